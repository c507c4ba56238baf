// Holds rendered manifests to the published definitions of kinds that Kubernetes itself does not have.
//   npm install && npm run check
// The schemas in ../schemas are written by hand, and run everywhere; here the npm packages that are generated from each project's own definitions
// judge the same objects twice: as TypeScript literals, in which a field that the type does not have is an error, and by their validators.

import { execFileSync } from "node:child_process";
import fs from "node:fs";
import * as yaml from "js-yaml";

const MODULES = {
  AnalysisTemplate: "@kubernetes-models/argo-rollouts/argoproj.io/v1alpha1/AnalysisTemplate",
  HTTPRoute: "@kubernetes-models/gateway-api/gateway.networking.k8s.io/v1/HTTPRoute",
  Rollout: "@kubernetes-models/argo-rollouts/argoproj.io/v1alpha1/Rollout",
  ServiceMonitor: "@kubernetes-models/prometheus-operator/monitoring.coreos.com/v1/ServiceMonitor",
};
const TYPES = "objects.ts";

const objects = process.argv
  .slice(2)
  .flatMap((file) => yaml.loadAll(fs.readFileSync(file, "utf8")))
  .filter((object) => object.kind in MODULES);
for (const kind of Object.keys(MODULES)) {
  if (!objects.some((object) => object.kind === kind)) throw new Error(`no ${kind} among the files`);
}

for (const object of objects) {
  const module = await import(MODULES[object.kind]);
  new module[object.kind](object).validate();
}

const imports = Object.entries(MODULES).map(([kind, module]) => `import type { I${kind} } from "${module}";`);
const literals = objects.map((object, index) => `export const object${index}: I${object.kind} = ${JSON.stringify(object)};`);
fs.writeFileSync(TYPES, [...imports, ...literals, ""].join("\n"));
const options = ["--noEmit", "--strict", "--skipLibCheck", "--module", "nodenext", "--target", "es2022"];
execFileSync("node_modules/.bin/tsc", [...options, TYPES], { stdio: "inherit" });
fs.rmSync(TYPES);
console.log(`${objects.length} objects of ${Object.keys(MODULES).length} kinds are as published`);
