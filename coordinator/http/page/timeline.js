"use strict";
// Draws one request: the parts of its life, and its handoff with a row per depth. Everything that
// comes from the service enters the page as text, never as markup.

const Timeline = (() => {
  const LEFT = 120, RIGHT = 8;
  let width = 1000; // of the pictures, in pixels: that of their place
  const PARTS = {
    queued: "queued", reserving: "reserving at decode", waiting_for_prefill: "waiting for prefill",
    prefill: "prefill", last_transfers: "last transfers", waiting_for_slot: "waiting for a slot",
    decode: "decode",
  };

  function svg(name, attributes, ...children) {
    const node = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    node.append(...children);
    return node;
  }

  function html(name, className, ...children) {
    const node = document.createElement(name);
    if (className) node.className = className;
    node.append(...children);
    return node;
  }

  function milliseconds(seconds) {
    const ms = seconds * 1000;
    return ms >= 10000 ? (ms / 1000).toFixed(1) + " s" : ms.toFixed(ms < 10 ? 2 : 1) + " ms";
  }

  function bytes(count) {
    if (count >= 1048576) return (count / 1048576).toFixed(1) + " MiB";
    return (count / 1024).toFixed(1) + " KiB";
  }

  function scale(start, stop) {
    const length = Math.max(stop - start, 1e-9);
    return (at) => LEFT + (width - LEFT - RIGHT) * Math.min(1, Math.max(0, (at - start) / length));
  }

  function bar(className, x, y, height, from, to, text) {
    const left = x(from), length = Math.max(2, x(to) - left);
    const shape = { class: className, x: left.toFixed(1), y, width: length.toFixed(1), height, rx: 2 };
    return svg("rect", shape, svg("title", {}, text));
  }

  function axis(x, start, stop, y, height) {
    const group = svg("g", {}), length = Math.max(stop - start, 1e-9);
    const rough = length / Math.max(2, Math.floor((width - LEFT) / 140)), power = 10 ** Math.floor(Math.log10(rough));
    const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough);
    for (let at = 0; at <= length * 1.0001; at += step) {
      const place = x(start + at).toFixed(1);
      group.append(svg("line", { class: "grid", x1: place, x2: place, y1: 0, y2: height }));
      const anchor = place > width - 50 ? "end" : "middle";
      group.append(svg("text", { x: place, y, "text-anchor": anchor }, milliseconds(at)));
    }
    return group;
  }

  function legend(entries) {
    return html("ul", "legend", ...entries.map(([name, text]) => html("li", "", html("i", name), text)));
  }

  function drawParts(parts, now) {
    const stop = Math.max(...parts.map((part) => part.stop_s ?? now)), start = parts[0].start_s;
    const x = scale(start, stop);
    const picture = svg("svg", { width, height: 46, role: "img", "aria-label": "Parts of the request" });
    picture.append(axis(x, start, stop, 42, 28), svg("text", { class: "label", x: 0, y: 17 }, "request"));
    for (const part of parts) {
      const end = part.stop_s ?? stop;
      const text = `${PARTS[part.name]}: ${milliseconds(end - part.start_s)}`;
      picture.append(bar(`part ${part.name}`, x, 4, 18, part.start_s, end, text));
    }
    const told = parts.map((part) =>
      [part.name, `${PARTS[part.name]} ${milliseconds((part.stop_s ?? stop) - part.start_s)}`]);
    return [html("h3", "", "From acceptance to the last token"), picture, legend(told)];
  }

  function depthRow(depth, spans, x, y, stop) {
    const name = depth === null ? "hidden" : String(depth);
    const row = svg("g", { class: "depth-row", "data-depth": name });
    const mine = spans.filter((span) => span.depth === depth);
    const sent = mine.reduce((sum, span) => sum + span.num_bytes, 0);
    const label = depth === null ? "hidden state" : `loop ${depth + 1} (depth ${depth})`;
    row.append(svg("text", { class: "label", x: 0, y: y + 13 }, label));
    row.append(svg("text", { x: 0, y: y + 26 }, sent ? bytes(sent) : "nothing sent"));
    row.append(svg("rect", { class: "lane", x: LEFT, y, width: width - LEFT - RIGHT, height: 28, rx: 3 }));
    for (const span of mine) {
      const end = span.stop_s ?? stop, took = milliseconds(end - span.start_s);
      if (span.kind === "computed") {
        row.append(bar("computed", x, y + 2, 11, span.start_s, end, `${label} computed in ${took}`));
      } else {
        const open = span.stop_s === null ? " open" : "";
        const text = `${label}: ${bytes(span.num_bytes)} in flight for ${took}`;
        row.append(bar("in-flight" + open, x, y + 15, 11, span.start_s, end, text));
      }
    }
    return row;
  }

  function drawHandoff(spans, stamps, now) {
    const start = Math.min(...spans.map((span) => span.start_s));
    const stop = Math.max(...spans.map((span) => span.stop_s ?? now));
    const x = scale(start, stop);
    const depths = [...new Set(spans.map((span) => span.depth))].filter((depth) => depth !== null);
    depths.sort((a, b) => a - b);
    const rows = spans.some((span) => span.depth === null) ? [...depths, null] : depths;
    const height = rows.length * 34;
    const picture = svg("svg", { width, height: height + 18, role: "img", "aria-label": "Handoff by depth" });
    picture.append(axis(x, start, stop, height + 14, height));
    rows.forEach((depth, index) => picture.append(depthRow(depth, spans, x, index * 34, stop)));
    const end = stamps.find(([event]) => event === "compute_end");
    if (end) {
      const place = x(end[1]).toFixed(1), left = bytes(end[4] ?? 0);
      picture.append(svg("line", { class: "compute-end", x1: place, x2: place, y1: 0, y2: height },
        svg("title", {}, `compute ended, ${left} not yet sent`)));
    }
    const unsent = end ? `Compute ended (dashed) with ${bytes(end[4] ?? 0)} unsent` : "";
    return [
      html("h3", "", "The handoff: which loop computed, which depth was in flight. ", unsent),
      picture,
      legend([["computed", "computed at prefill"], ["in-flight", "in flight to decode"]]),
    ];
  }

  function depthCells(depths, loops) {
    const cells = depths.map((depth) => {
      const share = loops > 1 ? (depth - 1) / (loops - 1) : 1;
      const cell = html("b", share > 0.5 ? "deep" : "", String(depth));
      cell.style.setProperty("--depth", share.toFixed(3));
      return cell;
    });
    return html("div", "depths", ...cells);
  }

  function draw(place, story, loops) {
    const now = story.now_s, pieces = [];
    width = Math.max(280, place.clientWidth);
    if (story.parts.length) pieces.push(...drawParts(story.parts, now));
    if (story.spans.length) pieces.push(...drawHandoff(story.spans, story.stamps, now));
    if (story.exit_depths.length) {
      pieces.push(html("h3", "", "Loops of each output token"), depthCells(story.exit_depths.slice(0, 600), loops));
    }
    place.replaceChildren(...pieces);
  }

  return { draw, depthCells, html, milliseconds };
})();
