// The page of a plan: what its bars hold, by a tip, and the plan under other limits and workloads, by `whatIf`.
(() => {
  const UNITS = [["GiB", 1n << 30n], ["MiB", 1n << 20n], ["KiB", 1n << 10n]];
  const FACTORS = {
    "": 1, b: 1, kib: 2 ** 10, mib: 2 ** 20, gib: 2 ** 30, tib: 2 ** 40, kB: 1e3, KB: 1e3, MB: 1e6, GB: 1e9, TB: 1e12,
  };
  const MAX_CELLS = 160, MIN_LABELLED = 2, THIN = 0.4;
  const CONTEXTS = [0, ...Array.from({ length: 12 }, (_, index) => 512 * 2 ** index)];
  const BATCHES = Array.from({ length: 9 }, (_, index) => 2 ** index);
  const NAMES = {
    embedding: "embeddings", block: "blocks", experts: "routed experts", head: "norms and heads", other: "other modules",
    kv: "KV cache", logits: "logits", activation: "activations", overhead: "overhead", workspace: "workspace",
    free: "free",
  };
  const TERMS = ["weights", "kv", "logits", "activation", "overhead", "workspace"];

  const at = (id) => document.getElementById(id);
  const model = JSON.parse(at("model").textContent);
  const places = model.refused ? null : [0, 1, 2];

  function make(tag, attributes = {}, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
    }
    element.append(...children);
    return element;
  }

  // Words. ----------------------------------------------------------------------------------------------------------

  const counted = (count, noun) => count + " " + noun + (count === 1 ? "" : "s");

  function sized(bytes) {
    const found = UNITS.find(([, factor]) => bytes >= factor);
    if (!found) return bytes + " B";
    return (Number(bytes) / Number(found[1])).toFixed(found[0] === "KiB" ? 1 : 2) + " " + found[0];
  }

  // Bytes as the command line reads them, exactly.
  function worded(bytes) {
    const found = bytes && UNITS.find(([, factor]) => bytes % factor === 0n);
    return found ? bytes / found[1] + found[0] : String(bytes);
  }

  function sizeOf(text) {
    const match = /^([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)$/.exec(text.trim());
    const factor = match && (FACTORS[match[2]] || FACTORS[match[2].toLowerCase()]);
    if (!factor) return null;
    const bytes = Math.floor(Number(match[1]) * factor);
    return bytes < 2 ** 50 ? BigInt(bytes) : null;
  }

  const lasting = (seconds) => seconds >= 1 ? seconds.toFixed(1) + " s"
    : seconds >= 0.001 ? (seconds * 1000).toFixed(0) + " ms" : seconds ? "under 1 ms" : "none";

  function precise(seconds) {
    const [unit, factor] = [["s", 1], ["ms", 1e3], ["µs", 1e6], ["ns", 1e9]].find(([, per]) => seconds * per >= 1) || ["s", 1];
    return Number((seconds * factor).toPrecision(3)) + " " + unit;
  }

  function share(part, whole) {
    const percent = whole ? 100 * Number(part) / Number(whole) : 0;
    return percent > 0 && percent < 0.05 ? "<0.1%" : percent.toFixed(1) + "%";
  }

  function numbered(numbers) {
    const runs = [];
    for (const number of numbers) {
      const last = runs[runs.length - 1];
      if (last && last[1] === number - 1) last[1] = number; else runs.push([number, number]);
    }
    const words = runs.slice(0, 5).map(([first, last]) => first === last ? String(first) : first + "-" + last);
    return words.join(", ") + (runs.length > 5 ? ", …" : "");
  }

  // What is asked. --------------------------------------------------------------------------------------------------

  const asPlanned = () => ({
    limits: model.devices.map(({ limit }) => limit === null ? null : BigInt(limit)),
    context: model.context, batch: model.batch, dtype: model.dtype, kvDtype: model.kvDtype,
  });
  const keyOf = (asked) => [...asked.limits, asked.context, asked.batch, asked.dtype, asked.kvDtype].map(String).join();
  let asked = asPlanned();

  function command() {
    const words = [model.command];
    model.devices.forEach(({ name }, index) => {
      const limit = asked.limits[index];
      if (limit) words.push("-m " + name + "=" + worded(limit));
      else if (name === "disk" && limit !== null) words.push("--no-disk");
    });
    if (asked.context) words.push("--context " + asked.context);
    if (asked.batch !== 1) words.push("--batch " + asked.batch);
    if (asked.dtype) words.push("--dtype " + asked.dtype);
    if (asked.kvDtype) words.push("--kv-dtype " + asked.kvDtype);
    return [...words, ...model.wishes].join(" ");
  }

  // Limits that would do, one device raised alone: the least of the slider's kind of steps, by halving.
  function enough() {
    const found = [];
    for (const index of places.slice(0, 2)) {
      const fits = (limit) => {
        const limits = asked.limits.slice();
        limits[index] = limit;
        return whatIf.answer(model, { ...asked, limits }).fits === true;
      };
      const step = 1n << (asked.limits[index] + wholeBytes >= 1n << 33n ? 30n : 20n);
      let low = asked.limits[index] / step, high = 1n;
      while (high <= low || high * step < 4n * wholeBytes) high *= 2n;
      if (wholeBytes < step || !fits(high * step)) continue;
      while (high - low > 1n) {
        const middle = (low + high) / 2n;
        if (fits(middle * step)) high = middle; else low = middle;
      }
      found.push(model.devices[index].name + "=" + worded(high * step));
    }
    return found;
  }

  const wholeBytes = places ? BigInt(Math.max(...model.scenarios.map(({ units, forms }) => (
    units.reduce((bytes, [, , [, form]]) => bytes + forms[form][0] + forms[form][1], 0))))) : 0n;

  // Controls. -------------------------------------------------------------------------------------------------------

  const controls = [];

  // A slider over `steps` values beside a field for any value.
  function slider({ label, most, valueAt, stepOf, shown, told, read, get, set, wrong }) {
    const id = "c" + controls.length;
    const field = make("input", { type: "text", id, spellcheck: "false", autocomplete: "off", "aria-describedby": id + "w" });
    const range = make("input", { type: "range", min: 0, max: most, step: 1, "aria-label": label });
    const message = make("span", { class: "wrong", id: id + "w", hidden: true });
    field.addEventListener("input", () => {
      const value = read(field.value);
      message.hidden = value !== null;
      message.textContent = value === null ? wrong : "";
      if (value === null) return field.setAttribute("aria-invalid", "true");
      field.removeAttribute("aria-invalid");
      set(value);
      update(field);
    });
    field.addEventListener("change", () => { if (read(field.value) === null) show(); });
    range.addEventListener("input", () => { set(valueAt(Number(range.value))); update(range); });
    const show = (besides) => {
      range.value = stepOf(get());
      range.setAttribute("aria-valuetext", told(get()));
      if (field === besides) return;
      field.value = shown(get());
      field.removeAttribute("aria-invalid");
      message.hidden = true;
    };
    controls.push(show);
    at("controls").append(make("div", { class: "control" }, make("label", { for: id }, label), field, range, message));
  }

  function choice(label, options, get, set) {
    const id = "c" + controls.length;
    const list = make("select", { id }, ...options.map(([value, text]) => make("option", { value }, text)));
    list.addEventListener("change", () => { set(list.value); update(list); });
    controls.push(() => { list.value = get(); });
    at("controls").append(make("div", { class: "control" }, make("label", { for: id }, label), list));
  }

  function limitSlider({ name }, index) {
    const planned = asked.limits[index];
    let step = 1;
    const most = Math.max(2 * Number(planned), 1.25 * Number(wholeBytes), 1);
    while (most / step > 400) step *= 2;
    slider({
      label: name, most: Math.ceil(most / step), valueAt: (place) => BigInt(place * step),
      stepOf: (bytes) => Math.round(Number(bytes) / step), shown: worded, told: (bytes) => bytes ? sized(bytes) : "none",
      read: sizeOf, get: () => asked.limits[index], set: (bytes) => { asked.limits[index] = bytes; },
      wrong: "A size is such as 22GiB, 512MiB or 23.6GB.",
    });
  }

  function countSlider(label, values, own, least, greatest, noun, get, set) {
    const sorted = [...new Set([...values, own])].sort((a, b) => a - b);
    const nearest = (value) => sorted.reduce((best, each, index) => (
      Math.abs(each - value) < Math.abs(sorted[best] - value) ? index : best), 0);
    slider({
      label, most: sorted.length - 1, valueAt: (place) => sorted[place], stepOf: nearest, shown: String,
      told: (value) => value ? counted(value, noun) : "weights only",
      read: (text) => {
        const value = /^[0-9]{1,10}$/.test(text.trim()) ? Number(text) : -1;
        return value >= least && value <= greatest ? value : null;
      },
      get, set, wrong: "A whole number from " + least + " to " + greatest + ".",
    });
  }

  function addControls() {
    const last = model.devices.length - 1, { limit } = model.devices[last];
    model.devices.slice(0, last).forEach(limitSlider);
    countSlider("context", CONTEXTS, model.context, 0, 2 ** 30, "token",
      () => asked.context, (value) => { asked.context = value; });
    countSlider("batch", BATCHES, model.batch, 1, 2 ** 20, "sequence",
      () => asked.batch, (value) => { asked.batch = value; });
    choice("disk", [["", "no limit"], ...(limit ? [[String(limit), worded(BigInt(limit))]] : []), ["0", "none"]],
      () => asked.limits[last] === null ? "" : String(asked.limits[last]),
      (text) => { asked.limits[last] = text === "" ? null : BigInt(text); });
    choice("weights", model.dtypes.map(([name]) => [name, name || "as stored"]),
      () => asked.dtype, (name) => { asked.dtype = name; });
    choice("KV cache", model.kvDtypes.map(([name]) => [name, name || "as computed"]),
      () => asked.kvDtype, (name) => { asked.kvDtype = name; });
  }

  // What is answered. -----------------------------------------------------------------------------------------------

  const percent = (part, whole) => (whole ? 100 * Number(part) / Number(whole) : 0).toFixed(4) + "%";

  // Modules that follow each other on a device and are of one list. Routed experts beside their block are part of it.
  function runsOf(found, tier) {
    const pieces = [];
    found.units.forEach((unit, index) => {
      if (found.tiers[index] !== tier || !unit.size) return;
      const last = pieces[pieces.length - 1];
      if (unit.isRouted && last && last.of === unit.of && !last.isRouted) {
        pieces[pieces.length - 1] = { ...last, name: [last.name[0], ""], size: last.size + unit.size };
      } else {
        pieces.push(unit);
      }
    });
    const runs = [];
    for (const piece of pieces) {
      const last = runs[runs.length - 1];
      const isAlike = last && piece.number !== null && last.kind === piece.kind && last.name.join() === piece.name.join();
      if (isAlike) last.units.push(piece); else runs.push({ name: piece.name, kind: piece.kind, units: [piece] });
    }
    return runs;
  }

  const nameOf = ([family, rest], units) =>
    [family, numbered(units.map((unit) => unit.number).filter((number) => number !== null)), rest].filter(Boolean).join(" ");

  function named(units) {
    const names = [...new Set(units.map(({ name }) => name))].slice(0, 3);
    return names.map((name) => nameOf(name, units.filter((unit) => unit.name === name))).join(", ");
  }

  function blocksOf(found, tier) {
    const row = found.rows[tier], runs = runsOf(found, tier);
    const isEach = runs.reduce((count, run) => count + run.units.length, 0) <= MAX_CELLS;
    const blocks = runs.map(({ name, kind, units }) => {
      const cells = isEach ? units.map((unit) => [unit]) : [units];
      const size = (members) => members.reduce((bytes, unit) => bytes + unit.size, 0n);
      return {
        kind, name: nameOf(name, units), bytes: size(units),
        cells: cells.map((members) => [nameOf(name, members), size(members)]),
      };
    });
    const held = row.weights - blocks.reduce((bytes, block) => bytes + block.bytes, 0n);
    const beside = [["other", "parameters of streamed modules", held],
      ...["kv", "logits", "activation", "overhead", "workspace", "free"].map((term) => [term, NAMES[term], row[term] || 0n])];
    for (const [kind, name, bytes] of beside) {
      if (bytes) blocks.push({ kind, name, bytes, cells: [[name, bytes]] });
    }
    return blocks;
  }

  function bar(found, tier, factor) {
    const { name: device } = model.devices[tier], row = found.rows[tier];
    const used = TERMS.reduce((bytes, term) => bytes + row[term], 0n), whole = row.budget === null ? used : row.budget;
    const segments = make("div", { class: "bar", role: "img" }), labels = make("div", { class: "labels", "aria-hidden": "true" });
    let start = 0n;
    for (const { kind, name, bytes, cells } of blocksOf(found, tier)) {
      cells.forEach(([cell, size], index) => {
        const part = 100 * Number(size) / Number(whole);
        const look = "s " + kind + (index ? "" : " first") + (part < THIN ? " thin" : "");
        segments.append(make("span", {
          class: look, style: "width:" + percent(size, whole),
          "data-tip": cell + "\n" + sized(size) + ", " + share(size, whole) + " of " + device,
        }));
      });
      if (100 * Number(bytes) / Number(whole) >= MIN_LABELLED) {
        const place = "left:" + percent(start, whole) + ";width:" + percent(bytes, whole);
        labels.append(make("div", { style: place }, make("span", {}, make("b", {}, name), figure(bytes, factor))));
      }
      start += bytes;
    }
    const usage = sized(used) + (row.budget === null ? ", no limit" : " of " + sized(row.budget) + ", " + share(used, whole));
    segments.setAttribute("aria-label", device + ": " + usage);
    return make("section", { class: "device", "aria-label": device },
      make("header", {}, make("h3", {}, device), make("p", {}, usage)), segments, labels);
  }

  const figure = (bytes, factor) => factor === 1 ? String(bytes)
    : bytes > 0n && Number(bytes) < 0.005 * factor ? "<0.01" : (Number(bytes) / factor).toFixed(2);

  function equation(found, tiers, [unit, factor]) {
    const terms = TERMS.filter((term) => term === "weights" || tiers.some((tier) => found.rows[tier][term]));
    const names = terms.map((term) => (NAMES[term] || term).replace(/^./, (letter) => letter.toUpperCase()) + " +");
    const title = "What fills each device, in " + unit;
    const cell = (bytes) => bytes === null || bytes === 0n ? make("td", { class: "none" }, "-")
      : make("td", { title: bytes + " bytes" }, figure(bytes, factor));
    const table = make("table", { "aria-label": title },
      make("thead", {}, make("tr", {}, ...["Device", "Budget =", ...names, "Free"].map((name) => make("th", { scope: "col" }, name)))),
      make("tbody", {}, ...tiers.map((tier) => {
        const { budget, free, ...row } = found.rows[tier];
        const cells = [budget, ...terms.map((term) => row[term]), free].map(cell);
        return make("tr", {}, make("th", { scope: "row" }, model.devices[tier].name), ...cells);
      })));
    return [make("h2", {}, title), make("div", { class: "scroll", role: "region", tabindex: 0, "aria-label": title + ", table" }, table)];
  }

  function showResult(found) {
    const tiers = places.filter((tier) => found.rows[tier].budget || found.rows[tier].weights);
    const smallest = tiers.map((tier) => found.rows[tier].budget || found.rows[tier].weights).reduce((a, b) => a < b ? a : b);
    const [unit, factor] = UNITS.find(([, bytes]) => smallest >= bytes) || ["B", 1n];
    const looks = new Set(tiers.flatMap((tier) => blocksOf(found, tier).map(({ kind }) => kind)));
    const keys = Object.keys(NAMES).filter((look) => looks.has(look));
    at("result").replaceChildren(
      make("h2", {}, "Devices"),
      make("ul", { class: "legend" }, ...keys.map((look) => make("li", {}, make("i", { class: look }), NAMES[look]))),
      ...tiers.map((tier) => bar(found, tier, Number(factor))),
      ...equation(found, tiers, [unit, Number(factor)]),
    );
  }

  const ratesOf = (found) => [["from RAM", model.link, found.onHost ? 0n : found.tokenBytes[1]], ["from disk", model.disk, found.tokenBytes[2]]]
    .filter(([, , bytes]) => bytes);
  const secondsOf = (found) => ratesOf(found).reduce((seconds, [, rate, bytes]) => seconds + Number(bytes) / rate, 0);
  const streamedOf = (found) => ratesOf(found).reduce((bytes, [, , each]) => bytes + each, 0n);

  const ratesNamed = (found) => ratesOf(found).map(([from, rate]) => sized(BigInt(rate)) + "/s " + from).join(" and ");

  function factsOf(found) {
    const times = whatIfTime.predicted(model, found, asked);
    const streamed = streamedOf(found), before = planned && streamedOf(planned);
    const was = (now, then, words) => now === then ? "as in the plan" : words(then) + " in the plan";
    const sizes = (bytes) => bytes ? sized(bytes) : "nothing";
    return [
      ["Streamed per token", sizes(streamed), was(streamed, before, sizes)],
      times ? ["A token", precise(times.token), "predicted; the first of a prompt after " + precise(times.first)]
        : ["Waiting for weights", lasting(secondsOf(found)), was(streamed, before, () => lasting(secondsOf(planned)))],
      ["Device changes", "0", "everything runs on " + model.devices[found.onHost ? 1 : 0].name],
      ["Search", found.exact ? "Exact" : "Ended early", found.exact ? "no placement waits less" : "others may wait less"],
    ];
  }

  function whereabouts({ rows }) {
    const whole = rows.reduce((bytes, row) => bytes + row.weights, 0n);
    const names = ["on " + model.devices[0].name, "in RAM", "on disk"];
    return rows.map(({ weights }, tier) => weights ? Math.round(100 * Number(weights) / Number(whole)) + "% " + names[tier] : "")
      .filter(Boolean).join(", ");
  }

  function verdict(found) {
    if (found.fits) return "It fits: " + whereabouts(found) + ".";
    if (found.fits === null) return "The search takes too long for a page. The command has the answer.";
    if (!asked.limits[0] && !asked.limits[1]) return "It does not fit: no device that computes has memory.";
    const limits = enough();
    return "It does not fit" + (limits.length ? ": it would with " + limits.join(", or with ") + "." : ".");
  }

  function subject(found) {
    const whole = found.rows.reduce((bytes, row) => bytes + row.weights, 0n);
    const batch = asked.batch > 1 ? counted(asked.batch, "sequence") + " of " : "";
    return sized(whole) + " as " + (asked.dtype || "stored") +
      (asked.context ? ", " + batch + counted(asked.context, "token") : "") + ", optimal policy";
  }

  // Time. -----------------------------------------------------------------------------------------------------------

  // Steps { lane, units, kind, start, seconds } of one forward, in lanes of one scale.
  function showTime(steps, told) {
    const lanes = [...new Set(steps.map(({ lane }) => lane))].sort();
    at("time").hidden = !steps.length;
    if (!steps.length) return;
    const end = Math.max(...steps.map(({ start, seconds }) => start + seconds));
    const busy = [];
    at("lanes").replaceChildren(...lanes.flatMap((lane) => {
      const own = steps.filter((step) => step.lane === lane);
      const seconds = own.reduce((all, step) => all + step.seconds, 0);
      busy.push(lane + " " + lasting(seconds));
      return [make("span", { class: "lane-name" }, lane), make("div", { class: "lane" }, ...joined(own, end).map((step) => make("span", {
        class: "s " + step.kind,
        style: "left:" + (100 * step.start / end).toFixed(4) + "%;width:" + (100 * step.seconds / end).toFixed(4) + "%",
        "data-tip": named(step.units) + "\n" + lane + " for " + precise(step.seconds) + ", from " + precise(step.start),
      })))];
    }), make("div", { class: "ticks" }, ...[0, 0.5, 1].map((part) => make("span", { style: "left:" + 100 * part + "%" }, precise(part * end)))));
    at("lanes").setAttribute("aria-label", "In " + lasting(end) + " are busy: " + busy.join(", "));
    at("rates").textContent = told;
  }

  // Neighbours of one kind that are too thin to be told apart are drawn as one.
  function joined(steps, end) {
    const drawn = [];
    for (const step of steps) {
      const last = drawn[drawn.length - 1], reach = last && last.start + last.seconds;
      if (last && last.kind === step.kind && step.seconds < 0.002 * end && step.start - reach < 0.001 * end) {
        last.seconds = step.start + step.seconds - last.start;
        last.units = [...last.units, ...step.units];
      } else {
        drawn.push({ ...step });
      }
    }
    return drawn;
  }

  function timeOf(found) {
    if (found === planned && model.prediction) {
      const steps = model.prediction.steps.map(([lane, name, start, seconds]) => (
        { lane, units: [{ name: [name, ""], number: null }], kind: "block", start, seconds }));
      return showTime(steps, model.prediction.told);
    }
    if (!found || !found.fits) return showTime([], "");
    const times = whatIfTime.predicted(model, found, asked);
    if (times) {
      const rate = Number((asked.batch / times.token).toPrecision(2));
      return showTime(times.steps, "About " + rate + " tokens/s; first token after " + precise(times.first) +
        "; loads in " + precise(times.load) + " (" + model.timing.name + ").");
    }
    showTime(whatIf.forwardSteps(model, found), "At " + ratesNamed(found) +
      ", one module after another. What is computed meanwhile takes time of its own, which is not shown.");
  }

  // The page. -------------------------------------------------------------------------------------------------------

  const original = ["subject", "answer", "facts"].map((id) => [at(id), [...at(id).childNodes]]);
  const planned = places && whatIf.answer(model, asked);

  function update(besides) {
    for (const show of controls) show(besides);
    const isPlanned = keyOf(asked) === keyOf(asPlanned());
    at("words").replaceChildren(...command().split(" ").flatMap((word) => [" ", make("span", {}, word)]).slice(1));
    at("back").disabled = isPlanned;
    const main = document.querySelector("main");
    main.classList.toggle("asked", !isPlanned && places !== null);
    at("facts").hidden = false;
    if (isPlanned || !places) {
      for (const [element, nodes] of original) element.replaceChildren(...nodes);
      at("result").replaceChildren();
      if (!isPlanned) at("answer").prepend("The command has the answer. The plan as it was made: ");
      return timeOf(planned);
    }
    const found = whatIf.answer(model, asked);
    at("answer").textContent = verdict(found);
    at("facts").hidden = !found.fits;
    if (found.fits) {
      at("subject").textContent = subject(found);
      at("facts").replaceChildren(...factsOf(found).map(([name, value, of]) => (
        make("div", {}, make("dt", {}, name), make("dd", {}, value, make("small", {}, of))))));
      showResult(found);
    } else {
      at("result").replaceChildren();
    }
    timeOf(found);
  }

  async function copy() {
    const words = at("words");
    getSelection().selectAllChildren(words);
    let isCopied = document.execCommand("copy");
    if (!isCopied && navigator.clipboard) isCopied = await navigator.clipboard.writeText(words.textContent).then(() => true, () => false);
    at("copy").textContent = isCopied ? "Copied" : "Selected";
    setTimeout(() => { at("copy").textContent = "Copy"; }, 2000);
  }

  at("how").textContent = model.refused
    ? model.refused + " The controls write the command that asks the planner; the figures below stay those of the plan."
    : "Move a control, and the page places the model anew, to the byte as this command would:";
  addControls();
  at("copy").addEventListener("click", copy);
  at("back").addEventListener("click", () => { asked = asPlanned(); update(); at("controls").querySelector("input").focus(); });
  at("what-if").hidden = false;
  update();

  // Tips. -----------------------------------------------------------------------------------------------------------

  const tip = make("div", { class: "tip", hidden: true });
  document.body.append(tip);
  for (const part of document.querySelectorAll(".bar [title], .lane [title]")) {
    part.dataset.tip = part.title;
    part.removeAttribute("title");
  }
  const hide = () => { tip.hidden = true; };
  addEventListener("pointermove", (event) => {
    const part = event.target instanceof Element && event.target.closest("[data-tip]");
    if (!part) return hide();
    tip.textContent = part.dataset.tip;
    tip.hidden = false;
    const { offsetWidth: width, offsetHeight: height } = tip;
    tip.style.left = Math.max(4, Math.min(event.clientX + 12, innerWidth - width - 4)) + "px";
    tip.style.top = (event.clientY > height + 20 ? event.clientY - height - 12 : event.clientY + 16) + "px";
  });
  addEventListener("scroll", hide, { passive: true });
  addEventListener("keydown", (event) => { if (event.key === "Escape") hide(); });
})();
