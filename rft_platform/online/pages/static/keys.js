// Keys of the preference page: a button with data-key is pressed by that key, unless text is being typed.
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("textarea, input")) return;
  const button = document.querySelector(`button[data-key="${CSS.escape(event.key)}"]`);
  if (button) {
    event.preventDefault();
    button.click();
  }
});
