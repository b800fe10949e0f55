// Bundles plot.js with its dependencies, and writes the licenses of everything in the bundle beside it.
import { build } from "esbuild";
import { readFileSync, readdirSync, writeFileSync } from "node:fs";
import { createHash } from "node:crypto";

const out = "../../ampaudit/render/html/vendor/";
const result = await build({
  entryPoints: ["plot.js"], bundle: true, minify: true, format: "iife", globalName: "Plot",
  target: "es2020", legalComments: "none", metafile: true, outfile: `${out}plot.js`,
});
const names = new Set();
for (const input of Object.keys(result.metafile.inputs)) {
  const found = input.match(/node_modules\/((?:@[^/]+\/)?[^/]+)\//);
  if (found) names.add(found[1]);
}
const parts = [...names].sort().map((name) => {
  const about = JSON.parse(readFileSync(`node_modules/${name}/package.json`));
  const file = readdirSync(`node_modules/${name}`).find((f) => /^licen[cs]e/i.test(f));
  const text = file ? readFileSync(`node_modules/${name}/${file}`, "utf8").trim() : `(${about.license})`;
  return `${name} ${about.version}\n\n${text}\n`;
});
const code = readFileSync(`${out}plot.js`);
const digest = createHash("sha256").update(code).digest("hex");
writeFileSync(`${out}LICENSES.txt`,
  `plot.js is a bundle, made by tools/charts, of these packages, unchanged (sha256 ${digest}).\n\n` +
  parts.join("\n" + "-".repeat(80) + "\n\n"));
console.log(`plot.js: ${code.length} bytes, ${parts.length} packages`);
