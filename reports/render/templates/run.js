(() => {
  const form = document.getElementById("filters");
  const entries = [...document.querySelectorAll("[data-subject]")];
  const values = (entry, name) => (name in entry.dataset ? entry.dataset[name].split("\n") : null);
  const selects = [...form.querySelectorAll("select")];
  for (const select of selects) {
    const known = new Set(entries.flatMap((entry) => values(entry, select.name) ?? []));
    for (const value of [...known].sort()) select.add(new Option(value, value));
  }
  const apply = () => {
    let shown = 0;
    for (const entry of entries) {
      entry.hidden = selects.some(({ name, value, selectedIndex }) => {
        const own = values(entry, name);
        return selectedIndex > 0 && own !== null && !own.includes(value);
      });
      shown += entry.hidden ? 0 : 1;
    }
    form.querySelector("output").textContent = `${shown} of ${entries.length} entries`;
  };
  form.addEventListener("change", apply);
  form.addEventListener("reset", () => setTimeout(apply));
  form.hidden = entries.length === 0;
  apply();

  // A link leads to its cause even if the filters hide it.
  const reveal = () => {
    if (document.getElementById(location.hash.slice(1))?.closest("[data-subject][hidden]")) {
      for (const select of selects) select.selectedIndex = 0;
      apply();
      document.getElementById(location.hash.slice(1)).scrollIntoView();
    }
  };
  addEventListener("hashchange", reveal);

  const copied = async (code) => {
    try {
      await navigator.clipboard.writeText(code.textContent);
      return true;
    } catch {
      getSelection().selectAllChildren(code);
      return document.execCommand("copy");
    }
  };
  for (const code of document.querySelectorAll(".replay code")) {
    const button = document.createElement("button");
    const said = document.createElement("span");
    button.type = "button";
    button.textContent = "Copy the command";
    said.role = "status";
    button.addEventListener("click", async () => {
      said.textContent = (await copied(code)) ? "Copied" : "Selected: copy it with the keyboard";
      setTimeout(() => (said.textContent = ""), 4000);
    });
    code.closest(".replay").append(button, " ", said);
  }
})();
