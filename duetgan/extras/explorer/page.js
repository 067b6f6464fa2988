// The explorer's page: it sends requests to the server (explorer/app.py) and shows the answers. It loads nothing else.

const at = (id) => document.getElementById(id);
const PAGES = [...document.querySelectorAll("main > section")];
let runs = [], uploadLimit = 0, imageFile = null; // imageFile: the image to classify

const setStatus = (text, isError = false) => {
  at("status").textContent = text;
  at("status").classList.toggle("note", isError);
};

async function request(path, options = {}, body = null) {
  let answer;
  try {
    const query = new URLSearchParams(options);
    answer = await fetch(`api/${path}?${query}`, body ? { method: "POST", body } : {});
  } catch {
    throw new Error("the explorer does not answer; is it still running?");
  }
  if (!answer.ok) throw new Error((await answer.text()).slice(0, 300));
  return answer.json();
}

// Wrap `work` so that it never runs twice at once: calls during a run are merged into one run after it.
function latest(work) {
  let busy = false, again = false;
  return async () => {
    if (busy) { again = true; return; }
    busy = true;
    do {
      again = false;
      const timer = setTimeout(() => setStatus("Computing…"), 400);
      try {
        await work();
        if (!again) setStatus("");
      } catch (error) {
        setStatus(error.message, true);
      }
      clearTimeout(timer);
    } while (again);
    busy = false;
  };
}

// --- elements

function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

function show(id, address, alt) {
  at(id).src = address;
  at(id).alt = alt;
}

const option = (text, value) => make("option", { textContent: text, value });
const field = (text, input) => make("label", {}, `${text} `, input);
const percent = (fraction) => `${(100 * fraction).toFixed(1)} %`;
// The runs that a form offers, by its data-for.
const FITS = { gan: (run) => run.task === "gan", styles: (run) => run.styles, classifier: (run) => run.task === "classifier" };

// Add a form's controls: the run and, for a GAN, the class and seed of a sample. Every change calls `changed`.
function addControls(form, changed) {
  const choices = (task) => runs.map((run, number) => [run, number]).filter(([run]) => FITS[task](run));
  const select = (name, task) => make("select", { name }, ...choices(task).map(([run, number]) => option(`${run.name}, step ${run.step}`, number)));
  const isGan = form.dataset.for !== "classifier";
  form.append(field("Model", select("run", form.dataset.for)));
  if (isGan) {
    const seed = { name: "seed", type: "number", min: 0, max: 4294967295, value: 0, required: true };
    form.append(field("Class", make("select", { name: "class" })), field("Seed", make("input", seed)));
  }
  if ("towards" in form.dataset) {
    form.append(field("Target class", make("select", { name: "target" })), field("Classifier", select("by", "classifier")));
  }
  if (isGan) {
    const range = make("input", { name: "psi", type: "range", min: 0, max: 1.5, step: 0.05 });
    range.value = 1;
    const output = make("output", { textContent: "1" });
    range.addEventListener("input", () => { output.textContent = range.value; });
    form.append(make("label", {}, "Truncation ", range, output));
  }
  const fill = () => {
    const run = runs[form.elements.run.value], choice = form.elements.class;
    choice.replaceChildren(...run.classes.map((name) => option(name, name)));
    choice.parentElement.hidden = !run.classes.length;
    form.elements.psi.parentElement.hidden = !run.styles;
    if (form.elements.target) {
      const classes = runs[form.elements.by.value].classes;
      form.elements.target.replaceChildren(...classes.map((name) => option(name, name)));
      form.elements.target.selectedIndex = Math.min(1, classes.length - 1);
    }
  };
  if (isGan) fill();
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("change", (event) => {
    if (isGan && ["run", "by"].includes(event.target.name)) fill();
  });
  form.addEventListener("input", () => form.checkValidity() ? changed() : setStatus(form.querySelector(":invalid").validationMessage, true));
  form.addEventListener("change", (event) => event.target.tagName === "SELECT" && changed());
}

const formOf = (id) => at(id).querySelector("form");
const values = (id) => {
  const entries = Object.fromEntries(new FormData(formOf(id)));
  if (!runs[entries.run].styles) delete entries.psi;
  return entries;
};

// --- draw

const NEXT = 12;
let drawnAddress = "";
const draw = latest(async () => {
  const { images } = await request("draw", { ...values("draw"), count: NEXT + 1 });
  const caption = (seed) => [values("draw").class, `seed ${seed}`].filter(Boolean).join(", ");
  const requestedSeed = Number(values("draw").seed);
  const first = images.find(({ seed }) => seed === requestedSeed) ?? images[0];
  drawnAddress = first.address;
  show("drawn", first.address, `Sample: ${caption(first.seed)}`);
  at("drawn-caption").textContent = caption(first.seed);
  at("save").href = first.address;
  at("save").download = `${caption(first.seed).replace(/[^\w-]+/g, "-")}.png`;
  at("next").replaceChildren(...images.filter((image) => image !== first).map(({ seed, address }) => {
    const button = make("button", { type: "button", title: `Seed ${seed}` }, make("img", { src: address, alt: `Seed ${seed}` }));
    button.addEventListener("click", () => drawSeed(seed));
    return button;
  }));
});

function drawSeed(seed) {
  formOf("draw").elements.seed.value = seed;
  draw();
}

at("new-seed").addEventListener("click", () => drawSeed(Math.floor(Math.random() * 2 ** 32)));

// --- edit

let edits = null;
const showEdit = () => {
  if (!edits) return;
  const { step, address, from, to } = edits.frames[at("amount").value];
  show("edited", address, `The sample, ${step} towards ${edits.target}`);
  at("edited-caption").textContent = `${step > 0 ? "+" : ""}${step}: ${edits.source} ${percent(from)}, ${edits.target} ${percent(to)}`;
};
const edit = latest(async () => {
  edits = await request("edit", values("edit"));
  at("amount").max = edits.frames.length - 1;
  showEdit();
});

// --- classify

const classify = latest(async () => {
  if (!imageFile) return;
  const result = await request("classify", values("classify"), imageFile);
  show("input-image", result.image, "The image at the input size of the classifier");
  show("evidence", result.evidence, "The image under a map of the evidence");
  const first = result.classes[0].name;
  at("evidence-caption").textContent = result.layer ? `Evidence for ${first} (Grad-CAM, ${result.layer})` : `No evidence for ${first}`;
  at("probabilities").tBodies[0].replaceChildren(...result.classes.map(({ name, probability }) => make("tr", {},
    make("th", { scope: "row", textContent: name }),
    make("td", {}, make("meter", { value: probability, ariaLabel: name })), make("td", { textContent: percent(probability) }))));
  at("prediction").hidden = false;
});

function classifyFile(file) {
  if (!file) return;
  if (file.size > uploadLimit) return setStatus(`${file.name} is larger than the limit of ${uploadLimit >> 20} MiB`, true);
  imageFile = file;
  classify();
}

// --- start

// Page -> the function that fills it.
const FILL = { draw, edit, classify };
const filled = new Set();

function showPage() {
  const name = location.hash.slice(1), available = PAGES.filter(({ dataset }) => !("missing" in dataset));
  const page = available.find(({ id }) => id === name) ?? available[0];
  for (const section of PAGES) section.hidden = section !== page;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.hash === `#${page?.id}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  setStatus("");
  scrollTo(0, 0); // The browser would scroll to the section that the address names.
  if (page && !filled.has(page.id)) {
    filled.add(page.id);
    if (page.id !== "classify") FILL[page.id](); // that page waits for an image
  }
}

// Page -> true if the runs cannot fill it.
const UNAVAILABLE = {
  draw: () => !runs.some(FITS.gan),
  edit: () => !(runs.some(FITS.styles) && runs.some(FITS.classifier)), classify: () => !runs.some(FITS.classifier),
};

async function start() {
  ({ runs, upload: uploadLimit } = await request("runs"));
  document.body.classList.toggle("smooth", runs.some((run) => run.resolution > 128)); // small images show their pixels
  for (const page of PAGES) {
    if (UNAVAILABLE[page.id]()) {
      page.dataset.missing = "";
      document.querySelector(`nav a[href="#${page.id}"]`).hidden = true;
    } else {
      addControls(page.querySelector("form"), FILL[page.id]);
    }
  }
  at("classify-sample").hidden = "missing" in at("classify").dataset;
  at("amount").addEventListener("input", showEdit);
  at("reset").addEventListener("click", () => { at("amount").value = edits?.frames.findIndex(({ step }) => step === 0) ?? 8; showEdit(); });
  at("file").addEventListener("change", () => classifyFile(at("file").files[0]));
  at("classify-sample").addEventListener("click", async () => {
    classifyFile(await (await fetch(drawnAddress)).blob());
    location.hash = "classify";
  });
  for (const name of ["dragover", "dragleave", "drop"]) {
    addEventListener(name, (event) => {
      event.preventDefault();
      at("drop").classList.toggle("over", name === "dragover");
      if (name === "drop" && !at("classify").hidden) classifyFile(event.dataTransfer.files[0]);
    });
  }
  addEventListener("hashchange", showPage);
  showPage();
}

start().catch((error) => setStatus(error.message, true));
