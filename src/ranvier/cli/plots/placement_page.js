
"use strict";
(() => {
  const byId = (id) => document.getElementById(id);
  const view = byId("view"), svg = view.querySelector("svg"), about = byId("about");
  const full = svg.viewBox.baseVal;
  const whole = { x: 0, y: 0, width: full.width, height: full.height };
  let box = { ...whole };

  function show(next) {
    box = next;
    svg.setAttribute("viewBox", [box.x, box.y, box.width, box.height].join(" "));
  }
  // units of the picture for each pixel: the picture is fitted, so the tighter side decides
  const unit = () => Math.max(box.width / view.clientWidth, box.height / view.clientHeight);
  function around(x, y, scale) {
    const width = view.clientWidth * scale, height = view.clientHeight * scale;
    show({ x: x - width / 2, y: y - height / 2, width, height });
  }
  function start() {
    const scale = Math.max(whole.width / view.clientWidth, whole.height / view.clientHeight);
    if (scale <= 2.5) { show({ ...whole }); return; }
    // too large to be read as a whole: begin at the top, above the first node
    const width = view.clientWidth * 1.4, height = view.clientHeight * 1.4;
    const first = svg.querySelector(".node");
    show({ x: (first ? middleOf(first).x : whole.width / 2) - width / 2, y: 0, width, height });
  }
  function middleOf(element) {
    const shape = element.getBBox(), matrix = svg.getScreenCTM().inverse().multiply(element.getScreenCTM());
    const middle = new DOMPoint(shape.x + shape.width / 2, shape.y + shape.height / 2).matrixTransform(matrix);
    return { shape, x: middle.x, y: middle.y, top: middle.y - shape.height / 2 };
  }
  function at(event) {
    const frame = view.getBoundingClientRect(), scale = unit();
    const left = box.x + box.width / 2 - frame.width / 2 * scale;
    const top = box.y + box.height / 2 - frame.height / 2 * scale;
    return { x: left + (event.clientX - frame.left) * scale, y: top + (event.clientY - frame.top) * scale };
  }
  function zoom(factor, point) {
    const centre = point || { x: box.x + box.width / 2, y: box.y + box.height / 2 };
    const width = box.width * factor;
    if (width < 20 || width > whole.width * 40 + 4000) return;
    show({
      x: centre.x - (centre.x - box.x) * factor, y: centre.y - (centre.y - box.y) * factor,
      width, height: box.height * factor,
    });
  }
  view.addEventListener("wheel", (event) => {
    event.preventDefault();
    zoom(Math.exp(Math.max(-60, Math.min(60, event.deltaY)) * 0.004), at(event));
  }, { passive: false });

  let held = null, dragged = false;
  view.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    held = { x: event.clientX, y: event.clientY };
    dragged = false;
  });
  view.addEventListener("pointermove", (event) => {
    if (held === null) return;
    const dx = event.clientX - held.x, dy = event.clientY - held.y;
    if (!dragged && Math.abs(dx) + Math.abs(dy) < 4) return;
    if (!dragged) { dragged = true; view.setPointerCapture(event.pointerId); view.classList.add("held"); }
    const scale = unit();
    show({ ...box, x: box.x - dx * scale, y: box.y - dy * scale });
    held = { x: event.clientX, y: event.clientY };
  });
  const release = () => { held = null; view.classList.remove("held"); };
  view.addEventListener("pointerup", release);
  view.addEventListener("pointercancel", release);

  const titleOf = (element) => {
    for (const child of element.children) if (child.tagName.toLowerCase() === "title") return child.textContent;
    return "";
  };
  let chosen = null;
  function choose(element) {
    if (chosen) chosen.classList.remove("chosen");
    chosen = element;
    if (chosen) { chosen.classList.add("chosen"); about.textContent = titleOf(chosen); }
  }
  const named = ".node, .move, .end, .part";
  svg.addEventListener("pointerover", (event) => {
    const over = event.target.closest(named);
    if (over && !chosen) about.textContent = titleOf(over);
  });
  svg.addEventListener("click", (event) => { if (!dragged) choose(event.target.closest(named)); });

  function go(element) {
    const { shape, x, y, top } = middleOf(element);
    const room = Math.max(shape.width / view.clientWidth, shape.height / view.clientHeight) * 1.2;
    if (room > 2.5) around(x, top + view.clientHeight * 0.6, 1.4);  // a large part is shown from its top
    else around(x, y, Math.max(room, 0.7));
    choose(element);
  }
  document.addEventListener("click", (event) => {
    const target = event.target.closest("[data-go]");
    if (target) go(byId(target.dataset.go));
  });

  const search = byId("search"), found = byId("found");
  const texts = Array.from(svg.querySelectorAll(".node, .move"), (e) => [e, titleOf(e).toLowerCase()]);
  let hits = [], current = -1;
  search.addEventListener("input", () => {
    const wanted = search.value.trim().toLowerCase();
    for (const hit of hits) hit.classList.remove("hit");
    hits = wanted ? texts.filter(([, text]) => text.includes(wanted)).map(([element]) => element) : [];
    for (const hit of hits) hit.classList.add("hit");
    svg.classList.toggle("searching", wanted !== "");
    found.textContent = wanted ? hits.length + " found" : "";
    current = -1;
  });
  search.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || !hits.length) return;
    if (event.shiftKey) current = (current <= 0 ? hits.length : current) - 1;
    else current = (current + 1) % hits.length;
    found.textContent = (current + 1) + " of " + hits.length;
    go(hits[current]);
  });
  byId("in").addEventListener("click", () => zoom(1 / 1.4));
  byId("out").addEventListener("click", () => zoom(1.4));
  byId("fit").addEventListener("click", () => show({ ...whole }));
  document.addEventListener("keydown", (event) => {
    if (event.target === search) return;
    if (event.key === "/") { event.preventDefault(); search.focus(); }
    if (event.key === "Escape") choose(null);
    if (event.key === "+") zoom(1 / 1.4);
    if (event.key === "-") zoom(1.4);
    if (event.key === "0") show({ ...whole });
  });
  start();
})();
