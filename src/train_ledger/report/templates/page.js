// Sorting, searching and filtering of the tables that are already in the page.
const unequal = new Intl.Collator("en", { numeric: true });
const tables = new Map();
for (const element of document.querySelectorAll("table.data")) {
  const many = element.classList.contains("many") && element.tBodies[0].rows.length > 15;
  // The bytes that are printed have commas, and a dash where there is no number.
  const table = new DataTable(element, {
    order: [],
    autoWidth: false,
    paging: many,
    pageLength: 15,
    lengthMenu: [15, 50, 200, { label: "all", value: -1 }],
    searching: many,
    info: many,
    columnDefs: [{ targets: "num", type: "num-fmt" }],
    layout: many
      ? { topStart: "search", topEnd: "pageLength", bottomStart: "info", bottomEnd: "paging" }
      : { topStart: null, topEnd: null, bottomStart: null, bottomEnd: null },
    language: { search: "Search this table:", lengthMenu: "Rows shown: _MENU_", emptyTable: "No rows", zeroRecords: "No row matches" },
  });
  tables.set(element.id, table);
  const pages = table.table().container().querySelector("nav");
  if (pages) pages.setAttribute("aria-label", `Pages of: ${element.caption.textContent}`);
}
const ledger = tables.get("table-ledger");
if (ledger) {
  const filters = document.getElementById("filters");
  const heads = [...ledger.table().node().tHead.rows[0].cells];
  heads.forEach((head, index) => {
    const name = head.textContent.trim();
    if (!["run", "rank", "ranks", "what", "name", "type", "verdict"].includes(name)) return;
    const text = (cell) => { const box = document.createElement("div"); box.innerHTML = cell; return box.textContent.trim(); };
    const values = [...new Set(ledger.column(index).data().toArray().map(text))].sort(unequal.compare);
    const label = document.createElement("label");
    label.append(name);
    const select = document.createElement("select");
    select.append(new Option("all", ""));
    for (const value of values) select.append(new Option(value, `=${value}`));
    select.addEventListener("change", () => {
      const wanted = select.value;
      ledger.column(index).search.fixed("choice", wanted ? (cell) => text(cell) === wanted.slice(1) : "").draw();
    });
    label.append(select);
    filters.append(label);
  });
}
// On paper every row of a table is shown, but of the two longest only what is on the screen; a line below says so.
const longest = new Set(["table-ledger", "table-peaks"]);
const lengths = new Map();
addEventListener("beforeprint", () => {
  for (const [id, table] of tables) if (!longest.has(id)) { lengths.set(id, table.page.len()); table.page.len(-1).draw(false); }
});
addEventListener("afterprint", () => {
  for (const [id, length] of lengths) tables.get(id).page.len(length).draw(false);
});
