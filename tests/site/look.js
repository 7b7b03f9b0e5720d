// What a reader would see of the page in the window, as plain data.
() => {
  const article = document.querySelector("article");
  const all = (selector) => [...article.querySelectorAll(selector)];
  const style = (element) => getComputedStyle(element);
  const shown = (element) => element.getClientRects().length > 0;
  const name = (element) => `${element.tagName} ${element.textContent.trim().slice(0, 60)}`;
  const has_text = (element) => [...element.childNodes].some((node) => node.nodeType === Node.TEXT_NODE && node.textContent.trim());

  // What stands out of the window to the right and is not inside something that scrolls by itself.
  const scrolls = (element) => element && element !== document.body
    && (["auto", "scroll"].includes(style(element).overflowX) || scrolls(element.parentElement));
  const stands_out = all("*").filter((one) => shown(one) && one.getBoundingClientRect().right > innerWidth + 1
    && !scrolls(one.parentElement));
  const cut_off = all("*").filter((one) => shown(one) && ["hidden", "clip"].includes(style(one).overflowX)
    && one.scrollWidth > one.clientWidth + 1);

  // Pictures are drawings: their text shrinks with them.
  const pictures = all("img").filter((one) => style(one).display !== "none");
  const text = all("p, td, th, li, pre code").filter((one) => one.offsetParent && has_text(one)).map((one) => parseFloat(style(one).fontSize));
  const drawn = pictures.filter((one) => one.naturalWidth).map((one) => 12 * one.clientWidth / one.naturalWidth);

  // Contrast by WCAG 2, of text against what lies behind it.
  const brush = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const once = (known, make) => (key) => known.get(key) ?? known.set(key, make(key)).get(key);
  const colour = once(new Map(), (value) => {
    brush.clearRect(0, 0, 1, 1);
    brush.fillStyle = value;
    brush.fillRect(0, 0, 1, 1);
    const [red, green, blue, alpha] = brush.getImageData(0, 0, 1, 1).data;
    return { channels: [red, green, blue], alpha: alpha / 255 };
  });
  const over = (front, back) => front.channels.map((one, i) => one * front.alpha + back[i] * (1 - front.alpha));
  const behind = once(new Map([[null, [255, 255, 255]]]), (element) => {
    const own = colour(style(element).backgroundColor);
    return own.alpha === 1 ? own.channels : over(own, behind(element.parentElement));
  });
  const linear = (channel) => (channel / 255 <= 0.03928 ? channel / 255 / 12.92 : ((channel / 255 + 0.055) / 1.055) ** 2.4);
  const luminance = (channels) => [0.2126, 0.7152, 0.0722].reduce((sum, weight, i) => sum + weight * linear(channels[i]), 0);
  const contrast = (element) => {
    const back = behind(element), front = over(colour(style(element)[element instanceof SVGElement ? "fill" : "color"]), back);
    const [low, high] = [luminance(back), luminance(front)].sort((a, b) => a - b);
    return (high + 0.05) / (low + 0.05);
  };
  const faint = all("*").filter((one) => shown(one) && has_text(one) && !one.matches(".headerlink") && contrast(one) < 4.5);

  return {
    width: document.documentElement.scrollWidth,
    stands_out: stands_out.map(name),
    cut_off: cut_off.map(name),
    faint: faint.map((one) => `${name(one)} ${contrast(one).toFixed(2)}`),
    smallest_text: Math.min(...text, ...drawn),
    pictures: pictures.map((one) => ({ source: one.src, width: one.naturalWidth, says: one.alt })),
    links: [...document.querySelectorAll("a[href]")].map((one) => one.href),
    ids: [...document.querySelectorAll("[id]")].map((one) => one.id),
    titles: all("h1").map((one) => one.textContent),
  };
}
