// The page is painted first; what fills it is fetched behind that.

requestAnimationFrame(() => setTimeout(() => import("./page.js")));
