// Runs before the first paint, so that a page with the dark theme does not flash white.
try {
    const theme = JSON.parse(localStorage.getItem("shoal.theme") ?? "null");
    if (theme) document.documentElement.dataset.theme = theme;
} catch {
    // Without localStorage, or if the stored value is not JSON, the page has the system's theme.
}
