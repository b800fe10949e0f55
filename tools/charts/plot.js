// The marks of Observable Plot that the HTML report draws with; `make charts` bundles them into one file.
export { axisX, axisY, barX, dot, gridX, plot, rectX, rectY, ruleX, ruleY, text } from "@observablehq/plot";
