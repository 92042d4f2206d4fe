// What is wrong with the layout of the page as it stands: a list of sentences.
() => {
  const faults = [];
  const width = document.documentElement.clientWidth;
  const scope = document.querySelector("dialog[open]") || document.body;

  const isSeen = (node) => node.checkVisibility({ checkVisibilityCSS: true, checkOpacity: true });
  const name = (node) => {
    const text = (node.innerText || node.value || "").slice(0, 40);
    return `${node.tagName.toLowerCase()}${node.id ? `#${node.id}` : ""}.${[...node.classList].join(".")} "${text}"`;
  };
  const isInScroller = (node) => {
    for (let at = node.parentElement; at && at !== document.body; at = at.parentElement) {
      const scrolls = /(auto|scroll)/.test(getComputedStyle(at).overflowX);
      if (scrolls && at.scrollWidth > at.clientWidth) return true;
    }
    return false;
  };

  if (document.documentElement.scrollWidth > width) {
    faults.push(`the page scrolls sideways: ${document.documentElement.scrollWidth} > ${width}`);
  }

  for (const node of scope.querySelectorAll("*")) {
    if (!isSeen(node) || node.closest("svg,.visually-hidden,.skip,video,.u-over,option")) continue;
    const style = getComputedStyle(node);
    const box = node.getBoundingClientRect();
    if (!box.width || !box.height) continue;

    const isBeyond = box.right > width + 1 || box.left < -1;
    if (isBeyond && !isInScroller(node)) {
      faults.push(`beyond the window: ${name(node)} ${Math.round(box.left)}..${Math.round(box.right)}`);
    }

    const hasText = [...node.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim());
    const clips = style.overflowX === "hidden" || style.overflowX === "clip";
    const isMarked = style.textOverflow === "ellipsis" || style.webkitLineClamp !== "none";
    if (hasText && clips && !isMarked && node.scrollWidth > node.clientWidth + 1) {
      faults.push(`text is cut off: ${name(node)}`);
    }
  }

  const apart = ".visually-hidden,.skip,.menu-list,.stage,.help-text";
  const controls = [...scope.querySelectorAll("a,button,input,select,textarea,summary")].filter(
    (node) => isSeen(node) && !node.closest(apart) && !node.matches(".cover,.wipe-line"),
  );
  // what is fixed or sticky lies above the rest on purpose
  const layer = (node) => {
    for (let at = node; at && at !== document.body; at = at.parentElement) {
      if (at.matches("dialog") || /(fixed|sticky)/.test(getComputedStyle(at).position)) return at;
    }
    return document.body;
  };
  const boxes = controls.map((node) => [node, node.getBoundingClientRect()]).filter(([, box]) => box.width && box.height);
  boxes.forEach(([a, one], index) => {
    for (const [b, two] of boxes.slice(index + 1)) {
      if (a.contains(b) || b.contains(a) || layer(a) !== layer(b)) continue;
      const across = Math.min(one.right, two.right) - Math.max(one.left, two.left);
      const down = Math.min(one.bottom, two.bottom) - Math.max(one.top, two.top);
      if (across > 3 && down > 3 && !isInScroller(a) && !isInScroller(b)) {
        faults.push(`overlap: ${name(a)} and ${name(b)}`);
      }
    }
  });
  return faults;
}
