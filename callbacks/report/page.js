// The report's charts and its tree. Text of models is only ever put into textContent and fillText.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const INK = "#22303c", QUIET = "#8a97a3", GRID = "#e6e9ec";
  for (const [id, plot] of Object.entries(data.charts)) Bokeh.Plotting.show(chart(plot), document.getElementById(id));

  // What is no number comes as null, which would be drawn as 0.
  function numbers(columns) {
    return Object.entries(columns).map(([name, column]) => [name, column.map((one) => one ?? NaN)]);
  }

  function chart(plot) {
    const fromZero = plot.share || plot.marks[0].kind === "bars";
    const figure = Bokeh.Plotting.figure({
      y_range: new Bokeh.DataRange1d({ ...(fromZero && { start: 0 }), ...(plot.high !== null && { end: plot.high }) }),
      height: 260, sizing_mode: "stretch_width", min_border: 4, tools: "", toolbar_location: null, outline_line_color: null,
      background_fill_alpha: 0, border_fill_alpha: 0, y_axis_type: plot.log ? "log" : "linear",
    });
    figure.toolbar.visible = false; // else a mark of it stays
    const named = new Map(); // label -> what it hides when it is clicked
    for (const { kind, colour, label = null, ...mark } of plot.marks) {
      const { alpha = 1, width = 1, dash = "solid", size = 1, ...columns } = mark;
      const source = new Bokeh.ColumnDataSource({ data: Object.fromEntries(numbers(columns)) });
      const [f, common] = [(field) => ({ field }), { source, color: colour, name: label }];
      let drawn = null;
      if (kind === "line") drawn = figure.line(f("x"), f("y"), { ...common, alpha, line_width: width, line_dash: dash });
      if (kind === "points") drawn = figure.scatter(f("x"), f("y"), { ...common, size });
      if (kind === "band") figure.varea(f("x"), f("low"), f("high"), { ...common, alpha: 0.15 });
      if (kind === "bars") drawn = figure.quad(f("left"), f("right"), f("bottom"), f("top"), { ...common, line_color: null });
      if (kind === "whiskers") {
        const head = () => new Bokeh.TeeHead({ line_color: colour, size: 8 });
        const ends = { base: f("x"), lower: f("low"), upper: f("high"), lower_head: head(), upper_head: head() };
        figure.add_layout(new Bokeh.Whisker({ source, line_color: colour, ...ends }));
      }
      if (label !== null) named.set(label, [...(named.get(label) ?? []), drawn]);
    }
    if (plot.share) figure.yaxis.formatter = new Bokeh.NumeralTickFormatter({ format: "0%" });
    figure.xgrid.grid_line_color = null;
    figure.ygrid.grid_line_color = GRID;
    const style = { axis_line_color: QUIET, major_tick_line_color: QUIET, minor_tick_line_color: null,
                    major_label_text_color: INK };
    for (const axis of figure.axes) axis.setv(style);
    const tooltips = [["", "$name"], ["step", "@x{0,0}"], ["", "@y{0.[00000]}"]];
    figure.add_tools(new Bokeh.HoverTool({ renderers: [...named.values()].flat(), tooltips }));
    const items = [...named].map(([label, renderers]) => new Bokeh.LegendItem({ label, renderers }));
    figure.add_layout(new Bokeh.Legend({ // two columns fit a phone
      items, orientation: "horizontal", ncols: Math.min(2, items.length), border_line_color: null, background_fill_alpha: 0,
      click_policy: "hide", label_text_font_size: "11px", spacing: 4, padding: 2, margin: 0,
    }), "below");
    return figure;
  }

  for (const box of document.querySelectorAll(".strip .text")) { // long prompts: begin where the policy speaks
    const said = box.querySelector(".said");
    if (said) box.scrollTop = Math.max(0, said.offsetTop - 60);
  }

  const canvas = document.getElementById("tree");
  if (!canvas) return;
  const find = (id) => document.getElementById(id);
  const [runs, steps, colours] = [find("tree-run"), find("tree-step"), find("tree-colour")];
  let batch, tree, root, chosen, ends; // root: the node that fills the canvas, -1 for all

  const option = (select, value, text) => {
    const one = document.createElement("option");
    one.value = value;
    one.textContent = text;
    select.append(one);
  };
  data.runs.forEach((run, i) => run.batches.length && option(runs, i, run.name));
  runs.hidden = runs.options.length < 2;

  function chooseRun() {
    steps.replaceChildren();
    const own = data.runs[+runs.value].batches;
    own.forEach((one, i) => option(steps, i, one.label));
    const told = own.findLastIndex((one) => one.tree.credit.some((credit) => credit)); // else all is of one colour
    steps.value = told < 0 ? own.length - 1 : told;
    chooseBatch();
  }
  function chooseBatch() {
    batch = data.runs[+runs.value].batches[+steps.value];
    tree = batch.tree;
    batch.images ??= batch.thumbnails.map((uri) => {
      const one = new Image();
      one.onload = draw;
      one.src = uri;
      return one;
    });
    colours.options[0].textContent = "coloured by " + batch.credit;
    const count = tree.parent.length;
    ends = new Int32Array(count); // one past the last node below
    tree.deepest = new Float64Array(count);
    for (let n = count - 1; n >= 0; n--) {
      ends[n] = Math.max(ends[n], n + 1);
      tree.deepest[n] = Math.max(tree.deepest[n], tree.start[n] + tree.length[n]);
      const up = tree.parent[n];
      if (up >= 0) {
        ends[up] = Math.max(ends[up], ends[n]);
        tree.deepest[up] = Math.max(tree.deepest[up], tree.deepest[n]);
      }
    }
    find("tree-about").textContent = batch.about;
    enter(-1);
  }

  // A window on the tree: tokens to the right, leaves downwards.
  function view() {
    if (root >= 0) {
      const up = tree.parent[root], lead = up >= 0 ? Math.min(tree.length[up], 0.08 * (tree.deepest[root] - tree.start[root])) : 0;
      return { x: tree.start[root] - lead, w: tree.deepest[root] - tree.start[root] + lead, y: tree.row[root], h: tree.rows[root] };
    }
    let wide = 1, high = 1;
    for (let n = 0; n < tree.parent.length; n++) {
      if (tree.parent[n] >= 0) continue;
      wide = Math.max(wide, tree.deepest[n]);
      high = Math.max(high, tree.row[n] + tree.rows[n]);
    }
    return { x: 0, w: wide, y: 0, h: high };
  }
  const pictures = (n) => tree.pictures?.[n] ?? []; // [which, first token, tokens] each; runs of old have none
  const mix = (a, b, t) => `rgb(${a.map((one, i) => Math.round(one + (b[i] - one) * t)).join()})`;
  const GREY = "rgb(221,226,230)", LOW = [197, 71, 43], MIDDLE = [243, 241, 234], HIGH = [30, 110, 170], GREEN = [38, 120, 90];
  function painter() {
    const kind = colours.value, values = tree[kind].filter((one) => one !== null);
    const low = values.reduce((a, b) => Math.min(a, b), Infinity), high = values.reduce((a, b) => Math.max(a, b), -Infinity);
    const number = (one) => (Number.isFinite(one) ? String(+one.toPrecision(3)) : "");
    let paint, ends, gradient;
    if (kind === "sequences") {
      const most = Math.log(Math.max(2, high));
      paint = (v) => mix(MIDDLE, GREEN, Math.log(v) / most);
      ends = ["1", number(high)];
      gradient = [mix(MIDDLE, GREEN, 0), mix(MIDDLE, GREEN, 1)];
    } else {
      const centre = kind === "credit" ? 0 : (low + high) / 2;
      const reach = kind === "credit" ? Math.max(Math.abs(low), Math.abs(high)) : (high - low) / 2;
      paint = (v) => (reach > 0 ? mix(MIDDLE, v < centre ? LOW : HIGH, Math.min(1, Math.abs(v - centre) / reach)) : mix(MIDDLE, HIGH, 0));
      ends = values.length ? [number(centre - reach), number(centre + reach)] : ["", ""];
      gradient = [mix(LOW, LOW, 0), mix(MIDDLE, LOW, 0), mix(HIGH, HIGH, 0)];
    }
    find("scale-low").textContent = ends[0];
    find("scale-high").textContent = ends[1];
    find("scale").style.background = `linear-gradient(90deg, ${gradient.join(", ")})`;
    return (n) => (tree[kind][n] === null ? GREY : paint(tree[kind][n]));
  }

  function draw() {
    const ratio = window.devicePixelRatio || 1, width = canvas.clientWidth, height = canvas.clientHeight;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    const pen = canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, height);
    pen.font = "11px ui-monospace, 'DejaVu Sans Mono', Menlo, monospace";
    pen.textBaseline = "middle";
    const colour = painter(), window_ = view(), [sx, sy] = [width / window_.w, height / window_.h];
    let drawn = 0, shown = 0;
    for (let n = 0; n < tree.parent.length; n++) {
      const x = (tree.start[n] - window_.x) * sx, w = tree.length[n] * sx, y = (tree.row[n] - window_.y) * sy, h = tree.rows[n] * sy;
      if (y >= height || x >= width || x + w <= 0 || y + h <= 0) continue;
      const gap = h > 3 ? 1 : 0;
      const painted = colour(n);
      pen.fillStyle = painted;
      pen.fillRect(x, y, Math.max(0.7, w - (w > 3 ? 1 : 0)), Math.max(0.7, h - gap));
      drawn++;
      if (n === chosen) {
        pen.strokeStyle = "#22303c";
        pen.lineWidth = 2;
        pen.strokeRect(Math.max(1, x) , Math.max(1, y), Math.min(width, x + w) - Math.max(1, x) - 2, Math.min(height, y + h) - Math.max(1, y) - 2);
      }
      const left = Math.max(0, x), room = Math.min(width, x + w) - left;
      if (h >= 12 && room >= 16) {
        const text = tree.text[n].slice(0, Math.floor((room - 6) / 6.7)).replace(/\s/g, " ");
        const [r, g, b] = painted.match(/\d+/g);
        pen.fillStyle = 0.3 * r + 0.6 * g + 0.1 * b < 125 ? "#fff" : "#22303c";
        pen.save();
        pen.beginPath();
        pen.rect(left, y, room - 2, h);
        pen.clip();
        pen.fillText(text, left + 4, Math.min(Math.max(y, 0) + Math.min(h, height) / 2, height - 8));
        pen.restore();
      }
      for (const [k, from, count] of pictures(n)) { // where they stand among the tokens
        const image = batch.images[k], [px, pw] = [x + from * sx, count * sx];
        if (!image?.naturalWidth || Math.min(pw, h) < 12) continue;
        const scale = Math.min((pw - 2) / image.naturalWidth, (h - 2) / image.naturalHeight, 2);
        const [iw, ih] = [image.naturalWidth * scale, image.naturalHeight * scale];
        pen.drawImage(image, px + (pw - iw) / 2, y + (h - ih) / 2, iw, ih);
        shown++;
      }
    }
    canvas.dataset.pictures = shown;
    canvas.dataset.drawn = drawn;
    canvas.dataset.nodes = tree.parent.length;
  }

  function at(event) {
    const box = canvas.getBoundingClientRect(), window_ = view();
    const x = window_.x + ((event.clientX - box.left) / box.width) * window_.w;
    const y = window_.y + ((event.clientY - box.top) / box.height) * window_.h;
    for (let n = 0; n < tree.parent.length; n++)
      if (x >= tree.start[n] && x < tree.start[n] + tree.length[n] && y >= tree.row[n] && y < tree.row[n] + tree.rows[n]) return n;
    return -1;
  }
  function enter(node) {
    root = chosen = node;
    find("tree-up").disabled = find("tree-all").disabled = node < 0;
    describe(node);
    draw();
  }
  const span = (text, kind) => {
    const one = document.createElement("span");
    one.className = kind;
    one.textContent = text;
    return one;
  };
  function describe(node) {
    const path = [];
    for (let n = node; n >= 0; n = tree.parent[n]) path.unshift(n);
    find("node-text").replaceChildren(...path.map((n) => span(tree.text[n], n === node ? "said" : "context")));
    find("node-pictures").replaceChildren(...path.flatMap((n) => pictures(n).flatMap(([k]) => {
      if (!batch.thumbnails[k]) return [];
      const one = document.createElement("img");
      one.src = batch.thumbnails[k];
      one.alt = one.title = `picture ${k + 1}`;
      one.className = n === node ? "said" : "context";
      return [one];
    })));
    const n = node, credit = n >= 0 && tree.credit[n];
    find("node-about").textContent = n < 0 ? "Nothing chosen yet." :
      `${tree.length[n]} tokens from position ${tree.start[n]}, shared by ${tree.sequences[n]} of ${batch.sequences} sequences` +
      `; ${batch.credit} ${credit === null ? "none: nothing in it is trained" : credit}; mean reward ${tree.reward[n]}. Blue is this box, grey what comes before it.`;
    find("node-text").scrollTop = find("node-text").scrollHeight;
  }

  canvas.addEventListener("click", (event) => enter(at(event)));
  canvas.addEventListener("mousemove", (event) => {
    const n = at(event);
    canvas.title = n < 0 ? "" : tree.text[n].slice(0, 300);
  });
  canvas.addEventListener("keydown", (event) => {
    const below = chosen + 1 < tree.parent.length && tree.parent[chosen + 1] === chosen ? chosen + 1 : chosen;
    const next = chosen >= 0 && ends[chosen] < tree.parent.length ? ends[chosen] : chosen;
    const to = { ArrowRight: chosen < 0 ? 0 : below, ArrowDown: next, ArrowLeft: chosen < 0 ? -1 : tree.parent[chosen], Escape: -1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    enter(to);
  });
  find("tree-up").addEventListener("click", () => enter(tree.parent[root]));
  find("tree-all").addEventListener("click", () => enter(-1));
  runs.addEventListener("change", chooseRun);
  steps.addEventListener("change", chooseBatch);
  colours.addEventListener("change", draw);
  new ResizeObserver(draw).observe(canvas);
  chooseRun();
})();
