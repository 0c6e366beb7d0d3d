"use strict";
// Places a model under other limits and workloads, as the planner does: run_memory.py, memory_tiers.py, knapsack.py and
// optimal.py of bigload/planning in the case of one accelerator or none. Bytes and costs are BigInt: costs are bytes times
// bandwidths, which numbers of 53 bits do not hold. Nothing here knows of a page.
const whatIf = (() => {
  const CHUNK = 2048n, MAX_STEPS = 1000, MAX_ALL_STEPS = 1000000, KNAPSACK_STEP = 10;
  const NEVER_STREAMED = 1n << 62n, SCALE = 1n << 64n;

  const int = (value) => value === null ? null : BigInt(value);
  const min = (...values) => values.reduce((a, b) => b < a ? b : a);
  const max = (...values) => values.reduce((a, b) => b > a ? b : a, 0n);
  const sum = (values) => values.reduce((a, b) => a + b, 0n);
  const ceilDiv = (a, b) => (a + b - 1n) / b;

  // What a forward pass needs beside the weights. -------------------------------------------------------------------

  function memoryOf(scenario, work) {
    if (!work.context) return { caches: scenario.caches.map(() => 0n), logits: 0n, activation: 0n };
    const rows = work.batch * (scenario.ofAllTokens ? work.context : 1n);
    return {
      caches: scenario.caches.map((cache) => cacheBytes(cache, scenario, work)),
      logits: rows * int(scenario.words) * 4n,
      activation: activationBytes(scenario, work),
    };
  }

  const sourceOf = (scenario, work) => scenario.source === null ? work.context : int(scenario.source);
  const reachOf = (work, window) => window === null ? work.context : min(work.context, window + CHUNK);

  function cacheBytes([perToken, window, perSource, state, wide, bits], scenario, work) {
    const computing = work.loadBits === null ? int(bits) : work.loadBits;
    const elements = int(perToken) * reachOf(work, int(window)) + int(perSource) * sourceOf(scenario, work);
    const stored = work.batch * elements * (work.kvBits === null ? computing : work.kvBits);
    return ceilDiv(stored + work.batch * (int(state) * computing + int(wide) * 32n), 8n);
  }

  function activationBytes(scenario, work) {
    const width = max((work.loadBits === null ? int(scenario.bits) : work.loadBits) / 8n, 1n);
    const source = sourceOf(scenario, work);
    const held = scenario.activations.map((block) => blockBytes(block, source, width, work));
    const windows = new Set(scenario.activations
      .filter((block) => block.attentions.length && !block.is_encoder && !block.is_stepwise)
      .map((block) => block.max_tokens));
    const masks = [...windows].map((window) => maskPairs(work, int(window)) * (work.isEager ? width : 1n));
    return max(...held) + sum(masks);
  }

  function maskPairs(work, window) {
    const longest = window === null ? CHUNK : min(CHUNK, window);
    if (work.context <= longest && work.batch === 1n) return 0n;
    return work.batch * min(work.context, CHUNK) * reachOf(work, window);
  }

  function blockBytes(block, source, width, work) {
    const window = int(block.max_tokens), encodes = block.is_encoder;
    const tokens = encodes ? source : block.is_stepwise ? 1n : min(work.context, CHUNK);
    const reach = encodes ? tokens : reachOf(work, window);
    const added = maskPairs(work, window) * width * (window === null ? 1n : 2n);
    const mask = encodes ? 0n : added / work.batch;
    const lengths = block.attentions.map((layer) => [layer, layer.is_cross ? source : reach]);
    const kept = sum(lengths.map(([layer, length]) => keptBytes(layer, tokens, length, width, work)));
    return work.batch * (tokens * int(block.stream) * width + max(
      tokens * int(block.feed_forward) * width + kept,
      ...block.scans.map((scan) => {
        const piece = int(scan.piece), padded = ceilDiv(tokens, piece) * piece;
        return tokens * int(scan.narrow) * width + padded * int(scan.wide) * 4n;
      }),
      ...lengths.map(([layer, length]) => attentionBytes(layer, tokens, length, width, mask, work)),
    ));
  }

  const keptBytes = (layer, tokens, reach, width, work) => tokens * reach * int(layer.num_heads) * width *
    ((work.isEager ? 1n + BigInt(layer.has_wide_queries) : 0n) + BigInt(layer.is_biased));

  function attentionBytes(layer, tokens, reach, width, mask, work) {
    const [projected, query, keyValue, cached] =
      [layer.projected, layer.query, layer.key_value, layer.cached].map(int);
    const [wideQueries, wideKeys] = layer.rotated_wide.map(int);
    const kept = layer.is_fused ? query + keyValue : 0n;
    const rotated = wideQueries || wideKeys
      ? tokens * ((projected + keyValue) * width + (wideQueries * query + wideKeys * keyValue / 2n) * 4n)
      : tokens * (projected + 3n * query + max(keyValue, query)) * width;
    const grown = tokens * (projected + keyValue + kept) + max(reach - tokens, 0n) * cached / 2n;
    const isRepeated = work.isEager || mask || layer.is_latent;
    const read = tokens * (projected + 2n * query + kept) + (isRepeated ? reach * int(layer.repeated) : 0n);
    const wide = work.isEager && layer.has_wide_queries ? tokens * query + reach * cached / 2n : 0n;
    const ofHeads = int(layer.num_heads) * pairBytes(layer, width, work.isEager);
    const pairs = tokens * reach * (ofHeads + int(layer.num_index_heads) * 8n);
    return max(rotated, grown * width, read * width + wide * 4n + pairs + (work.isEager ? 0n : mask));
  }

  function pairBytes(layer, width, isEager) {
    const biased = BigInt(layer.is_biased), [narrow, wide] = layer.scores.map(int);
    if (!isEager) return 2n * biased * width + (layer.is_broadcast ? 8n : 0n);
    const copied = wide && width >= 4n && !layer.has_wide_queries ? wide - 1n : wide;
    return (biased + narrow) * width + copied * 4n;
  }

  // Units, and where they may be. -----------------------------------------------------------------------------------

  function unitsOf(scenario, memory, isSplit) {
    const units = [];
    scenario.units.forEach(([number, kind, whole, caches, isHead, split], of) => {
      (isSplit && split.length ? split : [whole]).forEach(([name, form], index) => {
        const [size, held, token, stream] = scenario.forms[form].map(int);
        const isRouted = index > 0;
        const cache = isRouted ? 0n : sum(caches.map((each) => memory.caches[each]));
        const logits = isHead && !isRouted ? memory.logits : 0n;
        units.push({
          of, number, isRouted, kind: isRouted ? "experts" : kind, name: scenario.names[name],
          size, held, token, stream, cache, logits, run: cache + logits + held,
        });
      });
    });
    return units;
  }

  // A problem: units; limits of `accelerator`, `ram` and `disk`, 0n for none, null without a limit; `fixed` bytes of what
  // runs; buffers in flight; bandwidths. A placement: a tier for each unit, and whether RAM runs them.
  const ACCELERATOR = 0, RAM = 1, DISK = 2;
  const withoutAccelerator = (problem) => ({ ...problem, accelerator: 0n });
  const runsOnHost = (problem) => problem.accelerator === 0n;

  function loadsOf(problem, placement) {
    const loads = [0, 1, 2].map(() => ({ weights: 0n, kv: 0n, logits: 0n, fixed: 0n, workspace: 0n }));
    const running = placement.onHost ? RAM : ACCELERATOR;
    const streamed = [0n, 0n, 0n];
    problem.units.forEach((unit, index) => {
      const home = placement.tiers[index];
      loads[home].weights += unit.size;
      loads[running].weights += unit.held;
      loads[running].kv += unit.cache;
      loads[running].logits += unit.logits;
      streamed[home] = max(streamed[home], unit.stream);
    });
    if (problem.units.length) loads[running].fixed = placement.onHost ? problem.fixedRam : problem.fixed;
    const inFlight = placement.numInFlight;
    loads[running].workspace = inFlight * (placement.onHost ? streamed[DISK] : max(streamed[RAM], streamed[DISK]));
    if (!placement.onHost && problem.ram) loads[RAM].workspace = inFlight * streamed[DISK];
    for (const load of loads) load.total = sum(Object.values(load));
    return loads;
  }

  const limitsOf = (problem) => [problem.accelerator, problem.ram, problem.disk];
  const keepsLimits = (problem, placement) => loadsOf(problem, placement)
    .every((load, tier) => limitsOf(problem)[tier] === null || load.total <= limitsOf(problem)[tier]);

  function hostOf(problem) {
    const runs = runsOnHost(problem);
    const beside = runs ? problem.fixedRam + sum(problem.units.map((unit) => unit.run)) : 0n;
    return {
      ramRoom: problem.ram - beside, hasRam: problem.ram !== 0n, diskRoom: problem.disk,
      numInFlight: problem.numInFlight, ramCost: runs ? 0n : problem.diskRate, diskCost: problem.linkRate,
    };
  }

  const costOf = (problem, placement) => {
    const { ramCost, diskCost } = hostOf(problem), each = [0n, ramCost, diskCost];
    return sum(problem.units.map((unit, index) => unit.token * each[placement.tiers[index]]));
  };

  // The knapsack with two bins: counts by kind, depth first, the densest kind first. --------------------------------

  class Knapsack {
    constructor(kinds, first, second, least) {
      const density = (kind) => kind.size ? Number(kind.value) / Number(kind.size) : Infinity;
      const order = kinds.map((kind, index) => ({ ...kind, index, density: density(kind) }));
      order.sort((a, b) => b.density > a.density ? 1 : b.density < a.density ? -1
        : b.size > a.size ? 1 : b.size < a.size ? -1 : a.index - b.index);
      Object.assign(this, { kinds: order, first, second, least, steps: 0, best: null });
      this.rest = [...order.map(() => 0n), 0n];
      for (let depth = order.length - 1; depth >= 0; depth -= 1) {
        this.rest[depth] = this.rest[depth + 1] + order[depth].size * order[depth].count;
      }
      this.counts = order.map(() => [0n, 0n]);
    }

    descend(depth, room, spare, worth) {
      if (depth === this.kinds.length) return this.keep(room, spare, worth);
      const { index, size, value, count, required } = this.kinds[depth];
      const isLast = depth + 1 === this.kinds.length;
      const most = size ? min(count, room / size) : count;
      for (let taken = most; taken >= 0n; taken -= 1n) {
        const left = room - taken * size, gain = worth + taken * value * this.first.weight;
        if (this.hopeless(depth, left, spare, gain)) break;
        const putLeast = required ? count - taken : 0n;
        for (let put = size ? min(count - taken, spare / size) : count - taken; put >= putLeast; put -= 1n) {
          this.steps += 1;
          this.counts[index] = [taken, put];
          const below = spare - put * size, total = gain + put * value * this.second.weight;
          if (this.hopeless(depth + 1, left, below, total)) break;
          this.descend(depth + 1, left, below, total);
          if (isLast || this.rest[depth] - taken * size <= spare) break;
        }
        if (isLast && !required) break;
      }
      this.counts[index] = [0n, 0n];
    }

    hopeless(depth, room, spare, worth) {
      if (this.kept(room, spare) + this.rest[depth] < this.least) return true;
      if (this.best === null) return this.steps > 2 * MAX_STEPS;
      return this.steps > MAX_STEPS || this.bound(depth, room, spare, worth) <= this.best.worth;
    }

    kept(room, spare) {
      return this.first.capacity - room + this.second.capacity - spare;
    }

    keep(room, spare, worth) {
      if (this.kept(room, spare) >= this.least && (this.best === null || worth > this.best.worth)) {
        this.best = { counts: this.counts.slice(), worth };
      }
    }

    bound(depth, room, spare, worth) {
      for (const { size, value, count } of this.kinds.slice(depth)) {
        const all = size * count;
        if (!all) {
          worth += value * count * this.first.weight;
          continue;
        }
        const taken = min(all, room), put = min(all - taken, spare);
        worth += ceilDiv((taken * this.first.weight + put * this.second.weight) * value, size);
        room -= taken;
        spare -= put;
        if (!room && !spare) break;
      }
      return worth;
    }
  }

  // The split among three tiers that costs a token least. -----------------------------------------------------------

  class TierSplitter {
    constructor(problem) {
      this.host = hostOf(problem);
      this.members = new Map();
      problem.units.forEach((unit, index) => {
        const form = [unit.size, unit.token, unit.stream].join();
        if (!this.members.has(form)) this.members.set(form, { unit, indexes: [] });
        this.members.get(form).indexes.push(index);
      });
      this.kinds = [...this.members.values()].map(({ unit, indexes }) => (
        { size: unit.size, value: unit.token, stream: unit.stream, count: BigInt(indexes.length), indexes }));
      this.totalCost = sum(this.kinds.map((kind) => kind.value * kind.count)) * this.host.diskCost;
      this.streams = [...new Set(this.kinds.map((kind) => kind.stream))].sort((a, b) => a < b ? -1 : 1);
      this.steps = 0;
    }

    // `room` is null when no unit may be on the accelerator. Only what costs less than `below` is looked for.
    best(room, below = null) {
      let best = null, exact = true;
      for (const [streamed, fromDisk] of this.workspaces(room)) {
        const limit = best === null ? below : best.cost;
        const found = this.withWorkspace(room, streamed, fromDisk, limit);
        if (found !== null && (limit === null || found.cost < limit)) best = found;
        exact = exact && (found === null || found.exact);
      }
      return best === null ? null : { cost: best.cost, tiers: this.tiers(best.counts, room), exact };
    }

    *workspaces(room) {
      const last = this.streams.slice(-1);
      for (const streamed of room !== null ? [0n, ...this.streams] : last.length ? last : [0n]) {
        yield [streamed, 0n];
        for (const size of this.streams) {
          if (size > 0n && size <= streamed && this.host.diskRoom !== 0n) yield [streamed, size];
        }
      }
    }

    withWorkspace(room, streamed, fromDisk, below) {
      const { host } = this;
      this.steps += KNAPSACK_STEP * this.kinds.length;
      let left = room === null ? 0n : room - host.numInFlight * streamed, saved = 0n;
      const spare = host.ramRoom - (host.hasRam ? host.numInFlight * fromDisk : 0n);
      const kinds = [];
      for (const kind of this.kinds) {
        if (kind.stream > streamed) {
          left -= kind.size * kind.count;
          saved += kind.value * kind.count * host.diskCost;
        } else {
          kinds.push({ size: kind.size, value: kind.value, count: kind.count, required: kind.stream > fromDisk });
        }
      }
      if (left < 0n || spare < 0n) return null;
      const all = sum(kinds.map((kind) => kind.size * kind.count));
      const least = host.diskRoom === null ? 0n : all - host.diskRoom;
      const search = this.search(kinds, left, spare, least);
      if (below !== null && this.totalCost - saved - search.bound(0, left, spare, 0n) >= below) return null;
      if (all < least) return null;
      search.descend(0, left, spare, 0n);
      this.steps += KNAPSACK_STEP * (search.best === null ? kinds.length : search.steps);
      this.stopped = this.stopped || search.steps > MAX_STEPS;
      if (search.best === null) return null;
      let next = 0;
      const counts = this.kinds.map((kind) => kind.stream > streamed ? [kind.count, 0n] : search.best.counts[next++]);
      const cost = sum(this.kinds.map((kind, index) => {
        const [first, second] = counts[index];
        return kind.value * (second * host.ramCost + (kind.count - first - second) * host.diskCost);
      }));
      return { counts, cost, exact: search.steps <= MAX_STEPS };
    }

    search(kinds, room, spare, least) {
      const { diskCost, ramCost } = this.host;
      return new Knapsack(kinds, { capacity: max(room, 0n), weight: diskCost },
        { capacity: max(spare, 0n), weight: diskCost - ramCost }, least);
    }

    // A cost that no split is below.
    leastCost(room, leastStream) {
      const all = sum(this.kinds.map((kind) => kind.size * kind.count));
      const left = max(room - (all > room ? this.host.numInFlight * leastStream : 0n), 0n);
      const spare = max(this.host.ramRoom, 0n);
      return this.totalCost - this.search(this.kinds, left, spare, 0n).bound(0, left, spare, 0n);
    }

    tiers(counts, room) {
      const tiers = [];
      this.kinds.forEach(({ indexes }, kind) => {
        let [first, second] = counts[kind].map(Number);
        if (room === null) [first, second] = [0, this.host.hasRam ? first + second : second];
        indexes.forEach((unit, index) => {
          tiers[unit] = index < first ? ACCELERATOR : index < first + second ? RAM : DISK;
        });
      });
      return tiers;
    }
  }

  // The optimal policy. ---------------------------------------------------------------------------------------------

  class Search {
    constructor(problem) {
      this.problem = problem;
      this.splitter = new TierSplitter(problem);
      this.run = sum(problem.units.map((unit) => unit.run));
      this.whole = sum(problem.units.map((unit) => unit.size)) + this.run;
      this.leastStream = problem.units.length ? min(...problem.units.map((unit) => unit.stream)) : 0n;
    }

    placement(tiers, onHost, cost, exact) {
      return { tiers, onHost, cost, exact, numInFlight: this.problem.numInFlight };
    }

    // The cheapest placement with `room` bytes on the accelerator, of no higher cost than `atMost`.
    ranges(room, atMost = null) {
      const { problem, splitter } = this;
      if (room >= 0n && this.whole <= room) {
        return this.placement(problem.units.map(() => ACCELERATOR), false, 0n, true);
      }
      const left = room - this.run;
      if (left < 0n || (atMost !== null && splitter.leastCost(left, this.leastStream) > atMost)) return null;
      const split = splitter.best(left, atMost === null ? null : atMost + 1n);
      return split === null ? null : this.placement(split.tiers, false, split.cost, split.exact);
    }

    answer() {
      const { problem, splitter } = this;
      if (runsOnHost(problem)) {
        const split = splitter.best(null);
        return split === null ? null : this.placement(split.tiers, true, split.cost, split.exact);
      }
      const found = this.ranges(problem.accelerator - problem.fixed);
      return found !== null && problem.isSpread ? this.spread(found) : found;
    }

    // A placement of the same cost whose accelerator is as empty as possible: halving, by shares as the planner does.
    spread(found) {
      const { problem } = this, limit = problem.accelerator;
      const below = (most) => this.ranges(min(limit, most) - problem.fixed, found.cost);
      const peak = (placement) => loadsOf(problem, placement)[ACCELERATOR].total;
      let lowest = 0n, highest = peak(found), better = below(highest - 1n);
      while (better !== null && highest) {
        found = better;
        highest = peak(better);
        let top = highest * SCALE;
        while ((top - lowest) * 1000n > limit * SCALE) {
          const middle = (lowest + top) / 2n;
          better = below(middle / SCALE);
          if (better === null) {
            lowest = middle;
          } else {
            found = better;
            highest = peak(better);
            top = highest * SCALE;
          }
        }
        better = below(highest - 1n);
      }
      return found;
    }
  }

  function placed(problem) {
    const search = new Search(problem), found = search.answer();
    // The planner goes on by other means where a search stops early, and the page does not.
    if ((found === null && search.splitter.stopped) || search.splitter.steps > MAX_ALL_STEPS) throw new TooLong();
    return found;
  }

  class TooLong extends Error {}

  function fetchAhead(problem, placement) {
    const ahead = { ...placement, numInFlight: 2n };
    return keepsLimits(problem, ahead) ? ahead : placement;
  }

  function solve(problem) {
    let found = placed(problem);
    if (found === null && !runsOnHost(problem) && problem.ram) {
      problem = withoutAccelerator(problem);
      found = placed(problem);
    }
    return found === null ? null : { problem, placement: fetchAhead(problem, found) };
  }

  function solveModel(model, scenario, problemOf) {
    const whole = problemOf(false);
    if (!scenario.hasExperts || model.experts === "block") return solve(whole);
    const split = problemOf(true);
    if (model.experts === "split") {
      const units = split.units.map((unit) => unit.isRouted ? unit : { ...unit, stream: NEVER_STREAMED });
      const held = runsOnHost(split) ? null : placed({ ...split, units });
      return held === null ? solve(split) : { problem: split, placement: fetchAhead(split, held) };
    }
    const rank = ({ problem, placement }) =>
      [placement.onHost && whole.accelerator ? 1n : 0n, costOf(problem, placement)];
    const best = solve(whole), bestRank = best && rank(best);
    if (best && !bestRank[0] && !bestRank[1]) return best;
    const apart = solve(split);
    if (apart === null) return best;
    if (best === null) return apart;
    const [isWorse, cost] = rank(apart);
    return isWorse < bestRank[0] || (isWorse === bestRank[0] && cost < bestRank[1]) ? apart : best;
  }

  // The answer to a question: { limits: [accelerator, RAM, disk], context, batch, dtype, kvDtype }. `fits` is null where a
  // search would take too long.
  function answer(model, question) {
    const [, loadBits, number] = model.dtypes.find(([name]) => name === question.dtype);
    const [, kvBits] = model.kvDtypes.find(([name]) => name === question.kvDtype);
    const scenario = model.scenarios[number];
    const work = {
      context: BigInt(question.context), batch: BigInt(question.batch),
      loadBits: int(loadBits), kvBits: int(kvBits), isEager: model.isEager,
    };
    const memory = memoryOf(scenario, work);
    const [accelerator, ram, disk] = question.limits.map(int);
    const overhead = int(model.devices[0].overhead);
    const problemOf = (isSplit) => ({
      units: unitsOf(scenario, memory, isSplit), accelerator, ram, disk,
      fixed: memory.activation + overhead, fixedRam: memory.activation,
      numInFlight: BigInt(model.numInFlight), linkRate: int(model.link), diskRate: int(model.disk),
      isSpread: model.isSpread,
    });
    if (!accelerator && !ram) return { fits: false };
    let found;
    try {
      found = solveModel(model, scenario, problemOf);
    } catch (error) {
      if (!(error instanceof TooLong)) throw error;
      return { fits: null };
    }
    if (found === null) return { fits: false };
    const { problem, placement } = found;
    const loads = loadsOf(problem, placement), limits = [accelerator, ram, disk];
    const tokenBytes = [0n, 0n, 0n];
    problem.units.forEach((unit, index) => { tokenBytes[placement.tiers[index]] += unit.token; });
    return {
      fits: true, units: problem.units, tiers: placement.tiers, onHost: placement.onHost, exact: placement.exact,
      tokenBytes, isAhead: placement.numInFlight === 2n,
      rows: loads.map((load, tier) => ({
        budget: limits[tier], weights: load.weights, kv: load.kv, logits: load.logits,
        activation: load.fixed ? memory.activation : 0n,
        overhead: load.fixed && tier === ACCELERATOR ? overhead : 0n,
        workspace: load.workspace, free: limits[tier] === null ? null : limits[tier] - load.total,
      })),
    };
  }

  // One forward in time: steps { lane, units, kind, start, seconds }. One block after another is brought, from disk at its
  // bandwidth and on over the link as it comes, from RAM over the link. `computing` gives the seconds of a unit, or null
  // where they are not known: with room for a second block it is brought while the first computes.
  function forwardSteps(model, found, computing = () => null) {
    const steps = [], disk = Number(model.disk), link = Number(model.link), inFlight = found.isAhead ? 2 : 1;
    const ends = [];
    let arrived = 0, computed = 0;
    found.units.forEach((unit, index) => {
      const home = found.tiers[index], bytes = Number(unit.token);
      const isBrought = bytes > 0 && home !== ACCELERATOR && !(home === RAM && found.onHost);
      const label = { units: [unit], kind: unit.kind };
      if (isBrought) {
        const start = Math.max(arrived, ends.length >= inFlight ? ends[ends.length - inFlight] : 0);
        const seconds = bytes / (home === DISK ? disk : link), crossing = bytes / link;
        if (home === DISK) steps.push({ lane: "disk", ...label, start, seconds });
        if (!found.onHost) steps.push({ lane: "link", ...label, start: start + seconds - crossing, seconds: crossing });
        arrived = start + seconds;
      }
      const seconds = computing(unit);
      const start = Math.max(computed, isBrought ? arrived : 0);
      if (seconds) steps.push({ lane: "compute", ...label, start, seconds });
      computed = start + (seconds || 0);
      if (isBrought) ends.push(computed);
    });
    return steps;
  }

  return { answer, forwardSteps, memoryOf };
})();
