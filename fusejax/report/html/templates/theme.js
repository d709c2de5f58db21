// Light or dark: as the system is set, until the button says otherwise.

const theme = document.getElementById("theme");
const systemIsDark = matchMedia("(prefers-color-scheme: dark)");
const root = document.documentElement;

function remembered(...set) {
  try {  // a page from a file may have no storage
    if (set.length) localStorage.setItem("fusejax-theme", set[0]);
    return localStorage.getItem("fusejax-theme");
  } catch {
    return null;
  }
}

const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : systemIsDark.matches);

function showTheme() {
  theme.textContent = isDark() ? "Light" : "Dark";
  theme.setAttribute("aria-label", `${theme.textContent} colours`);
}

if (["dark", "light"].includes(remembered())) root.dataset.theme = remembered();
theme.addEventListener("click", () => {
  root.dataset.theme = isDark() ? "light" : "dark";
  remembered(root.dataset.theme);
  showTheme();
});
systemIsDark.addEventListener("change", showTheme);
showTheme();
theme.hidden = false;
