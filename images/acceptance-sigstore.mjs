// Holds every signature of a layout to @sigstore/verify: its own key is accepted; another key and a changed payload are refused.
// node acceptance-sigstore.mjs LAYOUT OWN.pub OTHER.pub
import crypto from 'node:crypto';
import fs from 'node:fs';
import path from 'node:path';
import { bundleFromJSON } from '@sigstore/bundle';
import { toSignedEntity, toTrustMaterial, Verifier } from '@sigstore/verify';

const [layout, ...keys] = process.argv.slice(2);
const [own, other] = keys.map((key) => crypto.createPublicKey(fs.readFileSync(key)));

// Whether a bundle is accepted; no transparency log and no certificate has a part in it.
function accepts(bundle, publicKey) {
  const nobody = { certificateAuthorities: [], timestampAuthorities: [], tlogs: [], ctlogs: [] };
  const trust = toTrustMaterial(nobody, () => ({ publicKey, validFor: () => true }));
  const thresholds = { tlogThreshold: 0, ctlogThreshold: 0, timestampThreshold: 0, tsaThreshold: 0 };
  try {
    new Verifier(trust, thresholds).verify(toSignedEntity(bundleFromJSON(bundle)));
    return true;
  } catch {
    return false;
  }
}

let count = 0;
const blobs = path.join(layout, 'blobs/sha256');
for (const name of fs.readdirSync(blobs)) {
  const file = path.join(blobs, name);
  if (fs.statSync(file).size > 4 << 20) continue;
  const text = fs.readFileSync(file, 'utf8');
  if (!text.startsWith('{"dsseEnvelope"')) continue;
  const bundle = JSON.parse(text);
  const statement = JSON.parse(Buffer.from(bundle.dsseEnvelope.payload, 'base64'));
  const changed = structuredClone(bundle);
  changed.dsseEnvelope.payload = Buffer.from(JSON.stringify({ ...statement, subject: [] })).toString('base64');
  const found = [accepts(bundle, own), accepts(bundle, other), accepts(changed, own)];
  if (found.join() !== 'true,false,false') throw new Error(`${statement.predicateType}: ${found}`);
  console.log(`${statement.predicateType}: own key accepted, other key and changed payload refused`);
  count += 1;
}
if (count !== 3) throw new Error(`${count} signatures, expected 3`);
