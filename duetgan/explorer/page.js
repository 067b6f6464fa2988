// The explorer's page: it asks the server (explorer/app.py) and shows what comes back. Nothing is loaded from elsewhere.

const at = (id) => document.getElementById(id);
const PAGES = [...document.querySelectorAll("main > section")];
let runs = [], upload = 0, content = null; // content: the image that is to be named

const tell = (text, bad = false) => {
  at("told").textContent = text;
  at("told").classList.toggle("note", bad);
};

async function ask(path, options = {}, body = null) {
  let answer;
  try {
    const query = new URLSearchParams(options);
    answer = await fetch(`api/${path}?${query}`, body ? { method: "POST", body } : {});
  } catch {
    throw new Error("the explorer does not answer; is it still running?");
  }
  if (!answer.ok) throw new Error((await answer.text()).slice(0, 300));
  return answer.headers.get("Content-Type").startsWith("application/json") ? answer.json() : answer.text();
}

// Of several calls while one is under way only the last is made, when that one is done.
function latest(work) {
  let busy = false, again = false;
  return async () => {
    if (busy) { again = true; return; }
    busy = true;
    do {
      again = false;
      const waiting = setTimeout(() => tell("Computing…"), 400);
      try {
        await work();
        if (!again) tell("");
      } catch (error) {
        tell(error.message, true);
      }
      clearTimeout(waiting);
    } while (again);
    busy = false;
  };
}

// --- parts of the page

function make(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

const figure = (address, caption, alt = caption) =>
  make("figure", { className: "image" }, make("img", { src: address, alt }), make("figcaption", { textContent: caption }));

function show(id, address, alt) {
  at(id).src = address;
  at(id).alt = alt;
}

const option = (text, value) => make("option", { textContent: text, value });
const field = (text, input) => make("label", {}, `${text} `, input);
const kinds = { gan: (run) => run.task === "gan", classifier: (run) => run.task === "classifier",
  steps: (run) => run.steps.length, two: () => true };

// A form's controls: which run, and for each sample its class and seed; `changed` is called with every change.
function controls(form, changed) {
  const fits = runs.map((run, place) => [run, place]).filter(([run]) => kinds[form.dataset.for](run));
  const names = form.dataset.for === "two" ? ["a", "b"] : ["run"];
  for (const [number, name] of names.entries()) {
    const choice = make("select", { name }, ...fits.map(([run, place]) => option(`${run.name}, step ${run.step}`, place)));
    choice.selectedIndex = Math.min(number, fits.length - 1);
    form.append(field({ run: "Model", a: "First run", b: "Second run" }[name], choice));
  }
  const samples = (form.dataset.sample ?? "none").split(" ").filter((which) => which !== "none");
  for (const [number, which] of samples.entries()) {
    const end = which && `_${which.toLowerCase()}`;
    form.append(field(`Class ${which}`.trim(), make("select", { name: `class${end}` })));
    const seed = { name: `seed${end}`, type: "number", min: 0, max: 4294967295, value: number, required: true };
    form.append(field(`Seed ${which}`.trim(), make("input", seed)));
  }
  if ("towards" in form.dataset) {
    const judges = runs.map((run, place) => [run, place]).filter(([run]) => kinds.classifier(run));
    form.append(field("Towards", make("select", { name: "target" })),
      field("By", make("select", { name: "by" }, ...judges.map(([run, place]) => option(run.name, place)))));
  }
  if ("psi" in form.dataset) {
    const range = make("input", { name: "psi", type: "range", min: 0, max: 1.5, step: 0.05 });
    range.value = 1;
    const output = make("output", { textContent: "1" });
    range.addEventListener("input", () => { output.textContent = range.value; });
    const mean = make("select", { name: "mean" }, option("its class", "class"), option("all samples", "global"));
    form.append(make("label", {}, "Truncation ", range, output), field("towards the mean of", mean));
  }
  const fill = () => {
    const run = runs[form.elements.run?.value];
    for (const [number, which] of samples.entries()) {
      const choice = form.elements[`class${which && `_${which.toLowerCase()}`}`];
      choice.replaceChildren(...run.classes.map((name) => option(name, name)));
      if (run.classes.length) choice.selectedIndex = number % run.classes.length;
      choice.parentElement.hidden = !run.classes.length;
    }
    if (form.elements.target) {
      const names = runs[form.elements.by.value].classes;
      form.elements.target.replaceChildren(...names.map((name) => option(name, name)));
      form.elements.target.selectedIndex = Math.min(1, names.length - 1);
    }
    if (form.elements.psi) {
      form.elements.psi.parentElement.hidden = !run.layers;
      form.elements.mean.parentElement.hidden = !(run.layers && run.classes.length);
    }
  };
  if (samples.length) fill();
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("change", (event) => {
    if (samples.length && ["run", "by"].includes(event.target.name)) fill();
  });
  form.addEventListener("input", () => form.checkValidity() ? changed() : tell(form.querySelector(":invalid").validationMessage, true));
  form.addEventListener("change", (event) => event.target.tagName === "SELECT" && changed());
}

const values = (id) => {
  const found = Object.fromEntries(new FormData(at(id).querySelector("form")));
  if (found.run !== undefined && !runs[found.run].layers) delete found.psi;
  return found;
};
const runOf = (id) => runs[values(id).run];
const seedOf = (id) => at(id).querySelector("form").elements.seed;

// --- draw

const NEXT = 12;
let drawnAddress = "";
const draw = latest(async () => {
  const { images } = await ask("draw", { ...values("draw"), count: NEXT + 1 });
  const what = (seed) => [values("draw").class, `seed ${seed}`].filter(Boolean).join(", ");
  const wanted = Number(values("draw").seed);
  const first = images.find(({ seed }) => seed === wanted) ?? images[0];
  drawnAddress = first.address;
  show("drawn", first.address, `Sample: ${what(first.seed)}`);
  at("drawn-told").textContent = what(first.seed);
  at("save").href = first.address;
  at("save").download = `${what(first.seed).replace(/[^\w-]+/g, "-")}.png`;
  at("next").replaceChildren(...images.filter((image) => image !== first).map(({ seed, address }) => {
    const button = make("button", { type: "button", title: `Seed ${seed}` }, make("img", { src: address, alt: `Seed ${seed}` }));
    button.addEventListener("click", () => { seedOf("draw").value = seed; draw(); });
    return button;
  }));
});

at("new-seed").addEventListener("click", () => { seedOf("draw").value = Math.floor(Math.random() * 2 ** 32); draw(); });

// --- mix

const mix = latest(async () => {
  const layers = [...at("layers").querySelectorAll("input:checked")].map((box) => box.value).join(",");
  const made = await ask("mix", { ...values("mix"), layers });
  for (const which of ["a", "b", "mixed"]) show(`mix-${which}`, made[which], which === "mixed" ? "The mixture" : `Sample ${which.toUpperCase()}`);
});

function layers() {
  const run = runOf("mix"), first = Math.ceil(run.layers / 2);
  at("layers").querySelectorAll("label").forEach((label) => label.remove());
  for (let layer = 0; layer < run.layers; layer++) {
    const box = make("input", { type: "checkbox", value: layer, checked: layer >= first });
    at("layers").append(make("label", {}, box, ` ${layer}`));
  }
}

// --- walk

let frames = [], playing = 0;
const step = () => {
  if (!frames.length) return;
  const place = Number(at("way").value);
  show("walked", frames[place], "An image on the way from A to B");
  at("walked-told").textContent = `${Math.round((100 * place) / (frames.length - 1))} % of the way`;
};
const walk = latest(async () => {
  ({ frames } = await ask("walk", values("walk")));
  at("way").max = frames.length - 1;
  step();
});
function play() {
  if (playing) {
    clearInterval(playing);
    playing = 0;
  } else {
    let way = 1;
    playing = setInterval(() => {
      const place = Number(at("way").value), last = frames.length - 1;
      if (place + way > last || place + way < 0) way = -way;
      at("way").value = place + way;
      step();
    }, 90);
  }
  at("play").textContent = playing ? "Stop" : "Play";
}

// --- edit

let edits = null;
const much = () => {
  if (!edits) return;
  const { step, address, from, to } = edits.frames[at("much").value];
  show("edited", address, `The sample, ${step} towards ${edits.target}`);
  at("edited-told").textContent = `${step > 0 ? "+" : ""}${step}: ${edits.source} ${percent(from)}, ${edits.target} ${percent(to)}`;
};
const edit = latest(async () => {
  edits = await ask("edit", values("edit"));
  at("much").max = edits.frames.length - 1;
  much();
});

// --- name

const percent = (share) => `${(100 * share).toFixed(1)} %`;
const named = latest(async () => {
  if (!content) return;
  at("spoke-found").replaceChildren();
  at("nearest-found").replaceChildren();
  const found = await ask("name", values("name"), content);
  show("seen", found.image, "The image as the classifier sees it");
  show("evidence", found.evidence, "The image under a map of the evidence");
  const first = found.classes[0].name;
  at("evidence-told").textContent = found.layer ? `Evidence for ${first} (Grad-CAM, ${found.layer})` : `No evidence for ${first}`;
  at("likely").tBodies[0].replaceChildren(...found.classes.map(({ name, probability }) => make("tr", {},
    make("th", { scope: "row", textContent: name }),
    make("td", {}, make("meter", { value: probability, ariaLabel: name })), make("td", { textContent: percent(probability) }))));
  at("named").hidden = false;
});

function take(file) {
  if (!file) return;
  if (file.size > upload) return tell(`${file.name} has more than the ${upload >> 20} MiB that are taken`, true);
  content = file;
  named();
}

// Long work behind a button, which says how long it has been at it.
function behind(button, work) {
  button.addEventListener("click", async () => {
    const text = button.textContent, begun = Date.now();
    const clock = setInterval(() => { button.textContent = `Searching, ${Math.round((Date.now() - begun) / 1000)} s…`; }, 500);
    button.disabled = true;
    const asked = content;
    try {
      tell("");
      const show = await work();
      if (content === asked) show(); // another image was dropped meanwhile
    } catch (error) {
      tell(error.message, true);
    }
    clearInterval(clock);
    button.textContent = text;
    button.disabled = false;
  });
}

async function spoke() {
  const { found, class: label } = await ask("spoke", values("name"), content);
  const shown = found.map((one) => figure(one.address, `record ${one.record}: ${one.class}`));
  return () => at("spoke-found").replaceChildren(...(shown.length ? shown : [`No training image spoke for ${label}.`]));
}

async function nearest() {
  const gan = at("draw").querySelector("form").elements.run.value;
  const { target, found } = await ask("nearest", { run: gan }, content);
  const shown = [figure(target, "as the generator was trained on it"), ...found.map((one) => figure(one.address, `${one.name}, ${one.words}`))];
  return () => at("nearest-found").replaceChildren(...shown);
}

// --- over time, and two runs

async function picture(id, run, place) {
  const found = await ask("history", { run, place });
  at(`${id}-told`).textContent = found.caption;
  if (found.address) show(id, found.address, `Samples at ${found.caption}`);
}

const history = latest(async () => {
  const { run } = values("time");
  at("place").max = runs[run].steps.length - 1;
  await picture("then", run, Math.min(at("place").value, at("place").max));
});
const ago = latest(async () => {
  for (const [id, run] of [["left", values("compare").a], ["right", values("compare").b]]) {
    const last = runs[run].steps.length - 1;
    at(id).hidden = last < 0;
    at(`${id}-told`).textContent = `${runs[run].name} has kept no samples`;
    if (last >= 0) await picture(id, run, Math.round((last * at("share").value) / 100));
    if (last >= 0) at(`${id}-told`).textContent = `${runs[run].name}, ${at(`${id}-told`).textContent}`;
  }
});
const compare = latest(async () => {
  at("compared").innerHTML = await ask("compare", values("compare")); // of the server's template, which escapes
  await ago();
});

// --- start

const BEGIN = { draw, mix, walk, edit, name: () => {}, time: history, compare };
const begun = new Set();

function turn() {
  const name = location.hash.slice(1), page = PAGES.find(({ id, dataset }) => id === name && !dataset.missing) ?? PAGES.find(({ dataset }) => !dataset.missing);
  for (const other of PAGES) other.hidden = other !== page;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.hash === `#${page?.id}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  if (playing) play();
  tell("");
  scrollTo(0, 0); // the page, not the section that the address names
  if (page && !begun.has(page.id)) {
    begun.add(page.id);
    BEGIN[page.id]();
  }
}

const LACKS = {
  draw: () => !runs.some(kinds.gan), walk: () => !runs.some(kinds.gan), mix: () => !runs.some((run) => run.layers),
  edit: () => !(runs.some(kinds.gan) && runs.some(kinds.classifier)), name: () => !runs.some(kinds.classifier), time: () => !runs.some(kinds.steps), compare: () => runs.length < 2,
};

async function start() {
  ({ runs, upload } = await ask("runs"));
  document.body.classList.toggle("smooth", runs.some((run) => run.resolution > 128)); // small images show their pixels
  for (const page of PAGES) {
    if (LACKS[page.id]()) {
      page.dataset.missing = "";
      document.querySelector(`nav a[href="#${page.id}"]`).hidden = true;
    } else {
      controls(page.querySelector("form"), () => BEGIN[page.id] && (page.id === "name" ? named() : BEGIN[page.id]()));
    }
  }
  if (!("missing" in at("mix").dataset)) {
    layers();
    at("mix").querySelector("form").elements.run.addEventListener("change", layers);
    at("layers").addEventListener("change", mix);
  }
  at("time").querySelector("form").elements.run?.addEventListener("change", () => { at("place").value = at("place").max; });
  at("place").max = at("place").value = Math.max(0, (runOf("time")?.steps.length ?? 1) - 1);
  at("ask").hidden = "missing" in at("name").dataset;
  at("nearest").hidden = !runs.some((run) => run.layers);
  at("way").addEventListener("input", step);
  at("much").addEventListener("input", much);
  at("reset").addEventListener("click", () => { at("much").value = edits?.frames.findIndex(({ step }) => step === 0) ?? 8; much(); });
  at("play").addEventListener("click", play);
  at("place").addEventListener("input", history);
  at("share").addEventListener("input", ago);
  at("file").addEventListener("change", () => take(at("file").files[0]));
  at("ask").addEventListener("click", async () => {
    take(await (await fetch(drawnAddress)).blob());
    location.hash = "name";
  });
  behind(at("spoke"), spoke);
  behind(at("nearest"), nearest);
  for (const name of ["dragover", "dragleave", "drop"]) {
    addEventListener(name, (event) => {
      event.preventDefault();
      at("drop").classList.toggle("over", name === "dragover");
      if (name === "drop" && !at("name").hidden) take(event.dataTransfer.files[0]);
    });
  }
  addEventListener("hashchange", turn);
  turn();
}

start().catch((error) => tell(error.message, true));
