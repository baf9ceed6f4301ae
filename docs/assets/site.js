// The calculator says how high it is, so that it scrolls with its page and not within it.
addEventListener("message", ({ source, data }) => {
  const frame = [...document.querySelectorAll("iframe.calculator")].find((each) => each.contentWindow === source);
  if (frame && Number.isFinite(data.height)) frame.style.height = `${data.height}px`;
});
