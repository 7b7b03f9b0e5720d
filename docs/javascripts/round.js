// One recorded round: draft, expand at a chosen budget, verify, commit. Plain JavaScript, no build step.
(function () {
  "use strict";
  const SVG = "http://www.w3.org/2000/svg";
  const ROW = 24, CHARACTER = 7.3, EDGE = 26;

  function element(name, attributes, text) {
    const made = document.createElementNS(SVG, name);
    Object.entries(attributes).forEach(([key, value]) => made.setAttribute(key, value));
    if (text !== undefined) made.textContent = text;
    return made;
  }

  const shown = (text) => text.replace(/\n/g, "\u21b5").replace(/ /g, "\u00b7");

  // Leaves get rows of their own, parents stand in the middle of their children.
  function layout(nodes) {
    const children = nodes.map(() => []);
    nodes.forEach((node, i) => { if (node.parent >= 0) children[node.parent].push(i); });
    const rows = new Array(nodes.length);
    let next = 0;
    (function place(i) {
      if (!children[i].length) { rows[i] = next++; return; }
      children[i].forEach(place);
      rows[i] = (rows[children[i][0]] + rows[children[i][children[i].length - 1]]) / 2;
    })(0);
    return { rows, height: next };
  }

  // Each node is its token and, fainter, the probability of its path; a column is as wide as its widest node.
  function drawTree(place, nodes, accepted) {
    const { rows, height } = layout(nodes);
    const size = (node) => CHARACTER * (shown(node.text).length + 1 + node.path.toFixed(2).length);
    const starts = [4];
    for (let depth = 0; depth <= Math.max(...nodes.map((node) => node.depth)); depth++) {
      starts.push(starts[depth] + EDGE + Math.max(...nodes.filter((node) => node.depth === depth).map(size)));
    }
    const width = starts[starts.length - 1], tall = height * ROW + 6;
    const svg = element("svg", { width, height: tall, viewBox: `0 0 ${width} ${tall}`, role: "img", "aria-label": "token tree" });
    // The theme shrinks pictures to the page; this one keeps its size and is scrolled.
    svg.style.cssText = `max-width: none; width: ${width}px; height: ${tall}px`;
    const x = (i) => starts[nodes[i].depth], y = (i) => rows[i] * ROW + 15;
    nodes.forEach((node, i) => {
      if (node.parent < 0) return;
      const kept = accepted.has(i);
      svg.append(element("line", {
        x1: x(node.parent) + size(nodes[node.parent]) + 3, y1: y(node.parent) - 4, x2: x(i) - 3, y2: y(i) - 4,
        class: kept ? "round-kept" : "round-edge",
      }));
    });
    nodes.forEach((node, i) => {
      const label = element("text", { x: x(i), y: y(i), class: accepted.has(i) || !i ? "round-kept" : "round-node" }, shown(node.text));
      label.append(element("tspan", { class: "round-path", dx: CHARACTER }, node.path.toFixed(2)));
      label.append(element("title", {}, `after its parent ${node.probability}, path ${node.path}`));
      svg.append(label);
    });
    place.replaceChildren(svg);
  }

  // The laws as the tree shows them: for each depth the tokens that occur there.
  function drawLaws(place, nodes) {
    const table = document.createElement("table");
    const depths = Math.max(...nodes.map((node) => node.depth));
    for (let depth = 1; depth <= depths; depth++) {
      const seen = new Map();
      nodes.filter((node) => node.depth === depth).forEach((node) => seen.set(node.text, node.probability));
      const row = table.insertRow();
      row.insertCell().textContent = `depth ${depth}`;
      const law = row.insertCell();
      [...seen].sort((a, b) => b[1] - a[1]).slice(0, 5).forEach(([text, probability]) => {
        const token = document.createElement("code"), item = document.createElement("span");
        token.textContent = shown(text);
        item.append(token, ` ${probability.toFixed(2)}`);
        law.append(item, " ");
      });
    }
    place.replaceChildren(table);
  }

  function start(root, record) {
    const tree = root.querySelector(".round-tree"), caption = root.querySelector(".round-caption");
    const text = root.querySelector(".round-text"), slider = root.querySelector("input"), output = root.querySelector("output");
    slider.max = record.nodes.length;
    let step = 0;
    function render() {
      const budget = Number(slider.value), nodes = record.nodes.slice(0, budget);
      output.textContent = budget;
      const path = [];
      for (const node of record.accepted) { if (node >= budget) break; path.push(node); }
      const next = path.length < record.accepted.length ? record.nodes[record.accepted[path.length]].text : record.bonus;
      const expected = nodes.reduce((sum, node) => sum + node.path, 0);
      const captions = [
        "The head's laws, one per depth.",
        `The best tree of ${nodes.length} nodes; if the target followed the draft's law it would keep ${expected.toFixed(2)} tokens.`,
        `The target accepts ${path.length} drafted tokens and adds its own: ${shown(next)}`,
        `${path.length + 1} tokens from one pass of the target.`,
      ];
      caption.textContent = captions[step];
      if (step === 0) drawLaws(tree, record.nodes); else drawTree(tree, nodes, new Set(step > 1 ? path : []));
      text.textContent = record.before;
      if (step === 3) {
        const mark = document.createElement("mark");
        mark.textContent = path.map((node) => record.nodes[node].text).join("");
        const bonus = document.createElement("strong");
        bonus.textContent = next;
        text.append(mark, bonus);
      }
      root.querySelectorAll("button").forEach((button) => button.setAttribute("aria-pressed", String(Number(button.dataset.step) === step)));
    }
    root.querySelectorAll("button").forEach((button) => button.addEventListener("click", () => { step = Number(button.dataset.step); render(); }));
    slider.addEventListener("input", render);
    render();
  }

  function load() {
    const root = document.getElementById("round");
    if (!root || root.dataset.started) return;
    root.dataset.started = "yes";
    fetch(root.dataset.source).then((answer) => answer.json()).then((record) => start(root, record))
      .catch((error) => { root.querySelector(".round-caption").textContent = `The record could not be loaded: ${error}`; });
  }

  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", load); else load();
})();
