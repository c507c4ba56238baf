#!/usr/bin/env python3
"""Opens a report of `outrider-verify all` in headless Chromium: are the charts drawn, is the console quiet, can differences be seen?

    verify/tests/browser/report.py verify-report/report.html [--screenshot docs/verify-report.png]

Needs Chromium (`apt-get install chromium`) and nothing of Python beside the standard library. Exit code 0 when all is well, 1 when not.
"""

import argparse
import html
import json
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

# A page around the report: it measures what the browser made of it and leaves the result in its own text.
WRAPPER = """<!doctype html><title>check</title><pre id="result">nothing</pre>
<iframe id="report" src="%s" width="1100" height="900"></iframe>
<script>
document.getElementById("report").addEventListener("load", (event) => {
  const page = event.target.contentDocument;
  const seen = (element) => { const box = element.getBoundingClientRect(); return box.width > 0 && box.height > 0; };
  // A level curve has no height.
  const drawn = (shape) => { const box = shape.getBoundingClientRect(); return box.width + box.height > 0; };
  const charts = [...page.querySelectorAll("svg.chart")].map((chart) => ({
    name: chart.getAttribute("aria-label"),
    seen: seen(chart),
    shapes: [...chart.querySelectorAll("rect, circle, polyline")].filter(drawn).length,
  }));
  const marks = [...page.querySelectorAll("mark")].filter((mark) => mark.textContent);
  const painted = (mark) => getComputedStyle(mark).backgroundColor !== "rgba(0, 0, 0, 0)";
  document.getElementById("result").textContent = JSON.stringify({
    title: page.title,
    charts,
    marks: marks.length,
    marks_seen: marks.filter((mark) => seen(mark) && painted(mark)).length,
    wider_than_window: page.documentElement.scrollWidth > page.documentElement.clientWidth,
  });
});
</script>
"""


def chromium(*arguments):
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if not program:
        sys.exit("error: Chromium is not installed: apt-get install chromium")
    with tempfile.TemporaryDirectory() as profile:
        command = [program, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
                   "--allow-file-access-from-files", "--enable-logging=stderr", f"--user-data-dir={profile}", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=180, check=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("report", type=pathlib.Path)
    parser.add_argument("--screenshot", type=pathlib.Path)
    arguments = parser.parse_args()
    report = arguments.report.resolve()
    with tempfile.TemporaryDirectory() as directory:
        wrapper = pathlib.Path(directory, "wrapper.html")
        wrapper.write_text(WRAPPER % report.as_uri())
        run = chromium("--virtual-time-budget=10000", "--dump-dom", wrapper.as_uri())
    result = re.search(r'<pre id="result">(.*?)</pre>', run.stdout, re.DOTALL).group(1)
    found = json.loads(html.unescape(result))
    console = [line for line in run.stderr.splitlines() if "CONSOLE" in line]
    faults = [f"the console says {line}" for line in console]
    if not found["charts"]:
        faults.append("there is no chart")
    for chart in found["charts"]:
        if not chart["seen"] or chart["shapes"] == 0:
            faults.append(f"the chart {chart['name']!r} is not drawn")
    if found["marks"] != found["marks_seen"]:
        faults.append(f"{found['marks'] - found['marks_seen']} of {found['marks']} marked texts can't be seen")
    if found["wider_than_window"]:
        faults.append("the page is wider than its window")
    if arguments.screenshot:
        target = arguments.screenshot.resolve()
        chromium("--window-size=1000,2250", "--force-device-scale-factor=0.65", f"--screenshot={target}", report.as_uri())
    print(f"{found['title']}: {len(found['charts'])} charts, {found['marks_seen']} marked texts")
    for fault in faults:
        print(f"FAIL  {fault}")
    sys.exit(1 if faults else 0)


main()
