//! The few things that are read from a Prometheus page: memory, and whether the process is still the same one.

use std::collections::BTreeMap;

/// The sums of the metrics of a page by name, over their labels.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Page {
    values: BTreeMap<String, f64>,
}

impl Page {
    /// Reads the text format of Prometheus; comments and what is no sample are skipped.
    pub fn read(text: &str) -> Self {
        let mut values = BTreeMap::new();
        for line in text.lines() {
            let line = line.trim();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let name_end = line.find(['{', ' ', '\t']).unwrap_or(line.len());
            let (name, rest) = line.split_at(name_end);
            // A label's value can hold anything but an unescaped quote.
            let value = match rest.strip_prefix('{') {
                None => rest,
                Some(labels) => match end_of_labels(labels) {
                    Some(end) => &labels[end..],
                    None => continue,
                },
            };
            let value = value
                .split_whitespace()
                .next()
                .and_then(|value| value.parse::<f64>().ok());
            if let Some(value) = value {
                *values.entry(name.to_owned()).or_default() += value;
            }
        }
        Self { values }
    }

    /// Resident memory of the process in bytes: of any metric whose name says so, whatever the server's prefix.
    pub fn resident_bytes(&self) -> Option<f64> {
        let named = |(name, value): (&String, &f64)| {
            name.ends_with("resident_memory_bytes").then_some(*value)
        };
        self.values.iter().find_map(named)
    }

    /// Whether the process of this page began after `earlier`: a start time that changed, or a counter that fell.
    pub fn restarted_since(&self, earlier: &Self) -> bool {
        self.values.iter().any(|(name, value)| {
            let Some(before) = earlier.values.get(name) else {
                return false;
            };
            let counter = ["_total", "_count"].iter().any(|end| name.ends_with(end));
            (name.ends_with("process_start_time_seconds") && value != before)
                || (counter && value < before)
        })
    }
}

/// Where the labels end, just behind their brace.
fn end_of_labels(labels: &str) -> Option<usize> {
    let (mut quoted, mut escaped) = (false, false);
    for (index, char) in labels.char_indices() {
        match char {
            _ if escaped => escaped = false,
            '\\' if quoted => escaped = true,
            '"' => quoted = !quoted,
            '}' if !quoted => return Some(index + 1),
            _ => {}
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_are_summed_over_labels_whatever_a_label_holds() {
        let page = Page::read(
            "# HELP x y\nx_total{code=\"a}b\\\" {\"} 2\nx_total{code=\"c\"} 3 1700000000\nouter_resident_memory_bytes 4.5e3\nbroken{ 1\nodd text\n",
        );
        assert_eq!(page.values["x_total"], 5.0);
        assert_eq!(page.resident_bytes(), Some(4500.0));
        assert!(!page.values.contains_key("broken"));
        assert!(!page.values.contains_key("odd"));
    }

    #[test]
    fn a_counter_that_falls_or_another_start_time_is_a_restart() {
        let page = |text: &str| Page::read(text);
        let before = page("x_total 5\ny 9\nprocess_start_time_seconds 10\n");
        assert!(!page("x_total 6\ny 1\nprocess_start_time_seconds 10\n").restarted_since(&before));
        assert!(page("x_total 4\n").restarted_since(&before));
        assert!(page("process_start_time_seconds 11\n").restarted_since(&before));
    }
}
