// Opens report pages in headless Chromium and fails on what a reader would trip over.
//
//   node tests/browser/page_check.mjs [--shots FOLDER] PAGE.html [PAGE.html ...]
//
// Checks each page at 1280 and 390 pixels, light and dark: no sideways overflow, no console error, no request to any
// network, no serious or critical finding of axe-core; and once that it opens in under a second and is under 1.5 MB.
// Installs nothing. CHROMIUM names the browser (default /usr/bin/chromium); NODE_MODULES the folder that holds the two
// packages playwright-core and axe-core (default ./node_modules).
import { createRequire } from "node:module";
import { mkdirSync, readFileSync, statSync } from "node:fs";
import { basename, join, resolve } from "node:path";
import { pathToFileURL } from "node:url";

const MOST_BYTES = 1.5e6, MOST_OPENING_MS = 1000;
const require = createRequire(join(resolve(process.env.NODE_MODULES || "node_modules"), "x.js"));
const { chromium } = require("playwright-core");
const axe = readFileSync(require.resolve("axe-core/axe.min.js"), "utf8");

const pages = process.argv.slice(2);
const shots = pages[0] === "--shots" ? pages.splice(0, 2)[1] : null;
if (!pages.length) { console.error("page_check: no page given"); process.exit(2); }
if (shots) mkdirSync(shots, { recursive: true });

const browser = await chromium.launch({
  executablePath: process.env.CHROMIUM || "/usr/bin/chromium", headless: true,
  args: ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync"] });

const failures = [];
for (const path of pages) {
  const bytes = statSync(path).size;
  if (bytes > MOST_BYTES) failures.push(`${path}: ${bytes} bytes`);
  for (const width of [1280, 390]) for (const colorScheme of ["light", "dark"]) {
    await check(path, width, colorScheme, bytes);
  }
}
await browser.close();
for (const failure of failures) console.error(`page_check: ${failure}`);
process.exit(failures.length ? 1 : 0);

async function check(path, width, colorScheme, bytes) {
  const context = await browser.newContext({ viewport: { width, height: 900 }, colorScheme, bypassCSP: true });
  const page = await context.newPage();
  const said = [], asked = [];
  page.on("console", message => { if (["error", "warning"].includes(message.type())) said.push(message.text()); });
  page.on("pageerror", error => said.push(String(error)));
  page.on("request", request => { if (!/^(file|data):/.test(request.url())) asked.push(request.url()); });
  await page.goto(pathToFileURL(resolve(path)).href, { waitUntil: "load" });
  const loaded = () => page.evaluate(() => performance.getEntriesByType("navigation")[0].loadEventEnd);
  let opening = await loaded();
  for (let i = 0; i < 4 && opening > MOST_OPENING_MS; i++) {      // the best of five: a busy machine is not a slow page
    await page.reload({ waitUntil: "load" });
    opening = Math.min(opening, await loaded());
  }
  const name = `${basename(path)} ${width} ${colorScheme}`;
  if (shots) await page.screenshot({ path: join(shots, `${name.replaceAll(" ", "-")}.png`), fullPage: true });
  await page.evaluate(() => { for (const each of document.querySelectorAll("details")) each.open = true; });
  const wide = await page.evaluate(() => document.documentElement.scrollWidth - window.innerWidth);
  await page.addScriptTag({ content: axe });
  const found = (await page.evaluate(() => axe.run(document))).violations;
  const grave = found.filter(each => ["serious", "critical"].includes(each.impact));
  console.log(`${name}: ${bytes} bytes, opened in ${Math.round(opening)} ms, overflow ${Math.max(0, wide)} px, ` +
              `axe ${grave.length} serious of ${found.length}, console ${said.length}, network ${asked.length}`);
  if (wide > 0) failures.push(`${name}: ${wide} px wider than the window`);
  if (opening > MOST_OPENING_MS) failures.push(`${name}: opened in ${Math.round(opening)} ms`);
  for (const text of said) failures.push(`${name}: console: ${text}`);
  for (const url of asked) failures.push(`${name}: asked the network for ${url}`);
  for (const each of grave) failures.push(`${name}: axe ${each.id}: ${each.nodes.length} × ${each.help}, e.g. ${each.nodes[0].html.slice(0, 160)}`);
  await context.close();
}
