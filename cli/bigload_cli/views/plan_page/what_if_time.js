"use strict";
// Predicts the time of a token of a placement of what_if.js, as predict.py, pipeline.py and residency.py of
// bigload/planning/timing do for models without routed experts and encoders. `model.timing` has the machine.
const whatIfTime = (() => {
  const SHARE_FOR_PAGES = 0.8, NUM_TOKENS = 4, PROMPT_TOKENS = 512;
  const ACCELERATOR = 0, RAM = 1, DISK = 2;
  const most = (values) => values.reduce((a, b) => b > a ? b : a, 0);

  // Blocks { unit, home, runsOn, bytes, cache, layers, launches, matrixRows } of a placement, in the order of its units.
  function blocksOf(timing, found) {
    const host = found.onHost ? RAM : ACCELERATOR;
    return found.units.map((unit, index) => ({
      unit, home: found.tiers[index], runsOn: found.tiers[index] === ACCELERATOR ? ACCELERATOR : host,
      bytes: Number(unit.size + unit.held), cache: Number(unit.cache), layers: timing.layers[index],
      launches: timing.launches[index], matrixRows: timing.matrixRows[index],
    }));
  }

  const isStreamed = (block) => block.home !== block.runsOn;

  // Where streamed weights are found in the steady state: "device", "cache" or "disk", null of all others.
  function sourcesOf(blocks, streamed, free, windowBytes) {
    const onHost = isOnHost(blocks);
    const paged = streamed.filter((block) => block.home === DISK).reduce((bytes, block) => bytes + block.bytes, 0);
    const roomFor = (bytes) => free === null ? null : Math.max(Math.min(Math.floor(SHARE_FOR_PAGES * free), free - bytes), 0);
    const fits = free === null || paged <= roomFor(0), room = roomFor(windowBytes);
    const kept = new Set(evenly(streamed, onHost && fits ? paged : 0));
    const cached = new Set(fits ? streamed : evenly(streamed, room));
    return blocks.map((block) => !streamed.includes(block) ? null : kept.has(block) ? "device" : cached.has(block) ? "cache" : "disk");
  }

  const isOnHost = (blocks) => blocks.filter(isStreamed).every((block) => block.runsOn === RAM);

  // Blocks that are fetched: rows of an embedding that the CPU looks up in place are faulted in when they are used.
  function fetchedOf(blocks, visits) {
    const onHost = isOnHost(blocks);
    const used = new Set(visits.filter(([, isLookup]) => !(isLookup && onHost)).map(([block]) => block));
    return blocks.filter((block, index) => isStreamed(block) && used.has(index));
  }

  function evenly(blocks, bytes) {
    const total = blocks.reduce((all, block) => all + block.bytes, 0);
    let credit = 0;
    return blocks.filter((block) => {
      credit += total ? block.bytes * Math.min(bytes / total, 1) : 0;
      const stays = block.bytes <= credit + 0.5;
      if (stays) credit -= block.bytes;
      return stays;
    });
  }

  // First touches of RAM that a host has taken back.
  const touchingOf = (timing, bytes) => timing.fresh ? bytes / timing.fresh : 0;

  // One run of a block: seconds of computing, and lanes [name, seconds] that bring its weights.
  function workOf(timing, block, source, [, isLookup, isHead], tokens, length, question, onHost, isFirst) {
    const device = timing.devices[block.runsOn], rows = question.batch * (isHead ? 1 : tokens);
    let seconds = 0;
    if (!isLookup) {
      let flops = 2 * rows * block.bytes * timing.elementsPerByte;
      if (block.layers) flops += 4 * rows * (tokens > 1 ? tokens / 2 : length) * timing.width;
      const cached = question.context ? block.cache * length / question.context : 0;
      const memory = (block.bytes + cached) / device.weightRate + block.matrixRows * device.rowSeconds;
      seconds = Math.max(memory, flops / device.flops) + device.launch * block.launches;
    }
    const lanes = [];
    if (source && source !== "device" && !(isLookup && onHost)) {
      if (block.home === DISK && source === "disk") {
        const touching = onHost && isFirst ? touchingOf(timing, block.bytes) : 0;
        lanes.push(["disk", block.bytes / (onHost && timing.mapped ? timing.mapped : timing.disk) + touching]);
      } else if (block.home === DISK) {
        lanes.push(["ram", onHost ? 0 : block.bytes / timing.load]);
      }
      if (device.link) lanes.push(["link", block.bytes / device.link]);
    }
    return { block, seconds, lanes, bytes: lanes.length ? block.bytes : 0 };
  }

  // At the beginning of which work each one that is fetched is requested: [first, number].
  function requestsOf(works, windowBytes) {
    const requests = [];
    let first = 0, waiting = 0;
    works.forEach((work, number) => {
      if (!work.lanes.length) return;
      waiting += number ? work.bytes : 0;
      while (first < number && waiting > windowBytes) {
        first += 1;
        waiting -= works[first].bytes;
      }
      requests.push([first, number]);
    });
    return requests;
  }

  function simulate(works, windowBytes) {
    const requests = requestsOf(works, windowBytes), free = {}, arrived = {}, steps = [], ends = [];
    let now = 0, asked = 0;
    works.forEach((work, number) => {
      for (; asked < requests.length && requests[asked][0] <= number; asked += 1) {
        const wanted = works[requests[asked][1]];
        const start = wanted.lanes.reduce((at, [lane]) => Math.max(at, free[lane] || 0), now);
        for (const [lane, seconds] of wanted.lanes) {
          steps.push({ lane, block: wanted.block, start, seconds });
          free[lane] = start + seconds;
        }
        arrived[requests[asked][1]] = start + most(wanted.lanes.map(([, seconds]) => seconds));
      }
      const begin = Math.max(now, arrived[number] || 0);
      steps.push({ lane: "compute", block: work.block, start: begin, seconds: work.seconds });
      ends.push(now = begin + work.seconds);
    });
    return { ends, steps };
  }

  // { token, first, load } in seconds and the steps of a token; null where the page does not predict.
  function predicted(model, found, question) {
    const timing = model.timing;
    if (!timing || !found.fits || question.dtype !== model.dtype || !timing.devices[found.onHost ? RAM : ACCELERATOR]) return null;
    const blocks = blocksOf(timing, found), running = found.rows[found.onHost ? RAM : ACCELERATOR];
    const ram = timing.ram === null ? found.rows[RAM].budget : timing.ram;
    const inRam = Number(found.rows[RAM].weights);
    const fetched = fetchedOf(blocks, timing.visits), largest = most(fetched.map((block) => block.bytes));
    const reserved = Number(running.workspace), windowBytes = reserved ? Math.max(reserved - largest, 0) : 2 * largest;
    const free = ram === null ? null : Math.max(Number(ram) - inRam, 0);
    const sources = sourcesOf(blocks, fetched, free, windowBytes + largest);
    const cold = blocks.map((block) => fetched.includes(block) ? "disk" : null);
    const prompt = Math.min(PROMPT_TOKENS, question.context || PROMPT_TOKENS), length = question.context ? prompt : 0;
    const pass = (state, tokens) => timing.visits.map((visit) => (
      workOf(timing, blocks[visit[0]], state[visit[0]], visit, tokens, length, question, found.onHost, state === cold)));
    const first = pass(cold, prompt), token = pass(sources, 1);
    const works = [...first, ...Array(token.some((work) => work.lanes.length) ? NUM_TOKENS : 1).fill(token).flat()];
    const { ends, steps } = simulate(works, windowBytes);
    const begin = ends[ends.length - 1 - token.length], end = ends[ends.length - 1];
    const loaded = [0, 1].map((tier) => Number(found.rows[tier].weights)), all = loaded[0] + loaded[1];
    const link = timing.devices[ACCELERATOR] && timing.devices[ACCELERATOR].link;
    return {
      token: end - begin, first: ends[first.length - 1],
      load: timing.matching + touchingOf(timing, loaded[RAM]) + Math.max(all / timing.coldLoad, link ? loaded[0] / link : 0),
      steps: steps.map((step) => {
        const start = Math.max(step.start, begin), stop = Math.min(step.start + step.seconds, end);
        return { lane: step.lane, units: [step.block.unit], kind: step.block.unit.kind, start: start - begin, seconds: stop - start };
      }).filter((step) => step.seconds > 0),
    };
  }

  return { predicted };
})();
