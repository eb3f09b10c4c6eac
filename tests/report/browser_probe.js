// Put at the end of a report by test_report_browser.py: helpers, then the test's own lines in place of PROBE.
const all = (selector) => [...document.querySelectorAll(selector)];
const chart = (key) => document.getElementById(`charts-${key}`);
// The floor is the line without a mark; what the schedule allows has the kernel's name and more.
const line = (key, name) =>
  chart(key).picture.lines.find((each) => (name === null ? !each.symbol && !each.dotted : each.name === name));
const points = (key, name) => line(key, name).points.map(({ x, y }) => [x, y]);
const text = (key, selector) => chart(key).querySelector(selector).textContent;
const nameOf = (label) => label.firstChild.textContent.trim();
const column = (name) => {
  const index = all("#results th").findIndex((th) => th.dataset.column === name);
  return all("#results tbody tr").map((tr) => tr.cells[index].textContent);
};
const choose = (label, option, place = "#charts-selectors") => {
  const control = all(`${place} label`).find((each) => nameOf(each) === label).lastChild;
  control.selectedIndex = [...control.options].findIndex((each) => each.text === option);
  control.dispatchEvent(new Event("change"));
};
const optionOf = (label) => label.lastChild.selectedOptions[0].text;
const selected = () => Object.fromEntries(all("#charts-selectors label").map((label) => [nameOf(label), optionOf(label)]));
const sortBy = (name) => {
  const th = document.querySelector(`#results th[data-column="${name}"]`);
  th.querySelector("button").click();
  return [th.getAttribute("aria-sort"), column(name)];
};
const filter = (words) => {
  const input = document.getElementById("filter");
  input.value = words;
  input.dispatchEvent(new Event("input"));
  return [document.getElementById("count").textContent, column("kernel")];
};
const probe = async () => { PROBE };

addEventListener("load", async () => {
  let seen = null;
  try { seen = await probe(); } catch (error) { failures.push(`probe: ${error}`); }
  const isDrawn = (each) => each.querySelector("svg .mark, svg .line path") !== null;
  const charts = all(".chart.charts").map((each) => [each.id.slice("charts-".length), isDrawn(each)]);
  if (!all(".chart.maps").every(isDrawn)) failures.push("a map is not drawn");
  const loaded = performance.getEntriesByType("resource").map((entry) => entry.name);
  const answer = document.createElement("pre");
  answer.id = "probe";
  answer.textContent = JSON.stringify({ seen, charts, loaded, failures });
  document.body.append(answer);
});
