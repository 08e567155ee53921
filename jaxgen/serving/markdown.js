// Elements of the page, and Markdown as elements. `page.py` inserts this file into page.html.
"use strict";

function make(name, className = "", text = "") {
  const element = document.createElement(name);
  element.className = className;
  element.textContent = text;
  return element;
}

function within(element, nodes) {
  for (const node of nodes) element.append(node); // as arguments of one call, many nodes would overflow the stack
  return element;
}

function button(className, text, click) {
  const element = make("button", className, text);
  element.type = "button";
  element.addEventListener("click", click);
  return element;
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch { // without https, there is no clipboard, and browsers offer only this
    const area = make("textarea");
    area.value = text;
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  }
}

function copier(text) {
  const element = button("small", "Copy", async () => {
    element.textContent = await copy(text()) ? "Copied" : "Not allowed";
    setTimeout(() => { element.textContent = "Copy"; }, 1500);
  });
  return element;
}

// A subset of Markdown. Texts are only set as the text of elements, and images are not loaded. The address of a link
// is always visible, and is http or https.
const FENCE = /^\s*(`{3,}(?=[^`]*$)|~{3,})\s*(\S*)/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)/;
const KINDS = [
  ["heading", /^#{1,6}\s/], ["rule", /^\s*([-*_])(\s*\1){2,}\s*$/], ["quote", /^\s*>/], ["list", ITEM], ["text", /\S/]];
const INLINE = new RegExp([
  /\\(?<escaped>[!-\/:-@[-`{-~])/, // the quantifiers are bounded, so that the time is linear in the text's length
  /(?<!`)(?<ticks>`+)(?!`)(?<code>[^]{1,999}?)(?<!`)\k<ticks>(?!`)/,
  /(?<!\*)\*\*(?!\*\*)(?=\S)(?<strong>(?:(?!\s\*\*\S)[^]){1,999}?)(?<=\S)\*\*(?!\*)/, // none begins in another
  /(?<!\w)__(?=[^\s_])(?<thick>[^]{1,999}?)(?<=\S)__(?!\w)/,
  /(?<![\w*])\*(?=[^\s*])(?<star>[^*]{1,999})(?<=\S)\*(?![\w*])/,
  /(?<!\w)_(?=[^\s_])(?<line>[^_]{1,999})(?<=\S)_(?!\w)/,
  /!?\[(?<label>[^\[\]]{1,500})\]\((?<target>https?:\/\/[^\s<>()]{1,999})\)/,
  /(?<url>\bhttps?:\/\/[^\s<>()]{0,999}[^\s<>().,;:!?'"*_`])/,
].map((part) => part.source).join("|"), "g");

function inline(text) {
  const nodes = [];
  let end = 0;
  for (const match of text.matchAll(INLINE)) {
    const {escaped, code, strong, thick, star, line, label, target, url} = match.groups;
    nodes.push(text.slice(end, match.index));
    end = match.index + match[0].length;
    if (escaped) nodes.push(escaped);
    else if (code) nodes.push(make("code", "", code.replace(/^ (.*) $/s, "$1")));
    else if (label) nodes.push(...inline(label), " (", link(target), ")");
    else if (url) nodes.push(link(url));
    else nodes.push(within(make(strong ?? thick ? "strong" : "em"), inline(strong ?? thick ?? star ?? line)));
  }
  return [...nodes, text.slice(end)];
}

function link(address) {
  const element = make("a", "", address);
  element.href = address;
  element.target = "_blank";
  element.rel = "noopener noreferrer";
  return element;
}

// The blocks of a text, as pairs of kind and source.
function blocksOf(text) {
  const blocks = [];
  let fence = "", kind = "";
  for (const line of text.split("\n")) {
    const mark = FENCE.exec(line)?.[1] ?? "";
    const next = fence || mark ? "code" : KINDS.find(([, pattern]) => pattern.test(line))?.[0] ?? "";
    const nested = next === "list" && /^\s{2}/.test(line) && blocks.at(-1)?.[0] === "list"; // also after empty lines
    const joins = fence || nested || (next === kind && next !== "heading") || (next === "text" && /list|quote/.test(kind));
    if (joins && next) blocks.at(-1)[1] += `\n${line}`;
    else if (next) blocks.push([next, line]);
    if (!fence) fence = mark;
    else if (mark.startsWith(fence) && line.trim() === mark) fence = "";
    kind = next === "code" ? "" : joins && !nested ? kind : next;
  }
  return blocks;
}

function blockOf([kind, source], depth = 0) {
  if (kind === "code") return codeBlock(source);
  if (kind === "rule") return make("hr");
  if (kind === "heading") return within(make(source.startsWith("##") ? "h4" : "h3"), inline(source.replace(/^#+\s+/, "")));
  if (kind === "list") return list(source);
  if (kind === "quote" && depth < 4) {
    const inner = blocksOf(source.replace(/^\s*> ?/gm, "")).map((block) => blockOf(block, depth + 1));
    return within(make("blockquote"), inner);
  }
  return within(make("p"), inline(source));
}

function codeBlock(source) {
  const [first, ...lines] = source.split("\n");
  const [, mark, language] = FENCE.exec(first);
  if (lines.length && lines.at(-1).trim().startsWith(mark) && FENCE.test(lines.at(-1))) lines.pop();
  const indent = first.search(/\S/);
  const code = lines.map((line) => line.slice(Math.min(indent, line.search(/\S|$/)))).join("\n");
  const bar = within(make("div", "bar", language), [copier(() => code)]);
  return within(make("div", "code"), [bar, make("pre", "", code)]);
}

function list(source) {
  const items = [];
  for (const line of source.split("\n")) {
    const [, indent, marker, text] = ITEM.exec(line) ?? [];
    if (marker) items.push({indent: indent.length, marker, text});
    else items.at(-1).text += `\n${line.trim()}`;
  }
  const all = make("div");
  const open = []; // the lists around the item, and their indents
  for (const {indent, marker, text} of items) {
    while (open.length > 1 && indent < open.at(-1).indent) open.pop();
    if (!open.length || (indent > open.at(-1).indent + 1 && open.length < 8)) {
      const element = make(/\d/.test(marker) ? "ol" : "ul");
      if (element.matches("ol")) element.start = parseInt(marker);
      (open.at(-1)?.element.lastChild ?? all).append(element);
      open.push({indent, element});
    }
    open.at(-1).element.append(within(make("li"), inline(text)));
  }
  return all;
}
