// Before anything is drawn: whoever chose dark sees no white flash.
try {
    const theme = JSON.parse(localStorage.getItem("shoal.theme") ?? "null");
    if (theme) document.documentElement.dataset.theme = theme;
} catch {
    // A browser that keeps nothing: the system's theme.
}
