(() => {
  const form = document.getElementById("filters");
  const fields = [...form.querySelectorAll("select, input")];
  const heads = [...document.querySelectorAll(".matrix thead th[data-column]")];
  const rows = [...document.querySelectorAll(".matrix tbody tr")];
  const columns = [...document.querySelectorAll(".column")];
  const evidence = [...document.querySelectorAll(".column tr[data-clause]")];
  const cells = rows.map((row) => [...row.querySelectorAll("td")]);
  const every = cells.map((own) => own.map((cell) => ({ css: cell.className, words: cell.innerHTML })));

  const show = (cell, before, dtype) => {
    if (!dtype) {
      cell.className = before.css;
      cell.innerHTML = before.words;
      return;
    }
    const said = cell.dataset[dtype] ?? "– not supported";
    const [mark, ...words] = said.split(" ");
    const state = ["not supported", "not run"].find((name) => said.includes(name)) ?? words[0];
    const link = document.createElement("a");
    const sign = document.createElement("span");
    sign.ariaHidden = "true";
    sign.textContent = mark;
    link.href = cell.querySelector("a").getAttribute("href");
    link.append(sign, ` ${words.join(" ")}`);
    cell.className = state.replace(" ", "-");
    cell.replaceChildren(link);
  };

  const apply = () => {
    const { text, clause, dtype, device } = Object.fromEntries(fields.map(({ name, value }) => [name, value]));
    const wanted = text.trim().toLowerCase();
    heads.forEach((head, number) => {
      const away = (device && head.dataset.device !== device) || !head.dataset.text.includes(wanted);
      head.hidden = away;
      columns[number].hidden = away;
      for (const own of cells) own[number].hidden = away;
    });
    rows.forEach((row, place) => {
      row.hidden = clause !== "" && row.dataset.clause !== clause;
      cells[place].forEach((cell, number) => show(cell, every[place][number], dtype));
    });
    for (const row of evidence) row.hidden = clause !== "" && row.dataset.clause !== clause;
    const shown = heads.filter((head) => !head.hidden).length;
    form.querySelector("output").textContent = `${shown} of ${heads.length} implementations`;
  };

  // The address holds the filters, so that a link leads to what is seen.
  const remember = () => {
    const asked = new URLSearchParams(fields.filter(({ value }) => value).map(({ name, value }) => [name, value]));
    try {
      history.replaceState(null, "", `${location.pathname}${asked.size ? `?${asked}` : ""}${location.hash}`);
    } catch {
      // A file's address may be fixed.
    }
  };
  const changed = () => {
    apply();
    remember();
  };
  const asked = new URLSearchParams(location.search);
  for (const field of fields) {
    const value = asked.get(field.name) ?? "";
    if (field.type === "search" || [...field.options].some((option) => option.value === value)) field.value = value;
  }
  form.addEventListener("input", changed);
  form.addEventListener("reset", () => setTimeout(changed));
  form.addEventListener("submit", (event) => event.preventDefault());
  form.hidden = heads.length === 0;
  apply();

  // A link leads to its row even if that is folded or hidden by the filters.
  const reveal = () => {
    const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
    const column = target?.closest(".column");
    if (!column) return;
    if (column.hidden || target.hidden) {
      form.reset();
      apply();
    }
    column.open = true;
    target.scrollIntoView();
  };
  addEventListener("hashchange", reveal);
  reveal();
})();
