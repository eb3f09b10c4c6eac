// What the charts and the table share: the data of the page, and how context lengths are written.
"use strict";
const page = JSON.parse(document.getElementById("data").textContent);

/** 1024 -> "1k", 1048576 -> "1M", 1000 -> "1000". */
function tokens(count) {
  if (count >= 1 << 20 && count % (1 << 20) === 0) return `${count >> 20}M`;
  return count >= 1024 && count % 1024 === 0 ? `${count >> 10}k` : `${count}`;
}
