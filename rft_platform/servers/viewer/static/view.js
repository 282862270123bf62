// Keys: j and k move through the runs, / goes to the search field, u goes back to the list.
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) return;
  const links = [...document.querySelectorAll("a.run")];
  const at = links.indexOf(document.activeElement);
  if (event.key === "j" && links.length) links[Math.min(at + 1, links.length - 1)].focus();
  else if (event.key === "k" && links.length) links[Math.max(at - 1, 0)].focus();
  else if (event.key === "/" && document.querySelector("[name=text]")) document.querySelector("[name=text]").focus();
  else if (event.key === "u" && document.querySelector("a.back")) document.querySelector("a.back").click();
  else return;
  event.preventDefault();
});
