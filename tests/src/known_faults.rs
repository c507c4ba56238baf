//! Holds `docs/known-faults.md` to the tests it names.

use std::fs;

use crate::fixtures;

/// Kinds in the table; none is taken out of it.
const KINDS: usize = 20;

#[test]
fn every_known_fault_names_tests_that_exist() {
    let root = fixtures::workspace().unwrap();
    let root = root.root();
    let text = fs::read_to_string(root.join("docs/known-faults.md")).unwrap();
    let rows: Vec<&str> = text
        .lines()
        .filter(|line| line.starts_with("| ") && !line.starts_with("| kind |"))
        .filter(|line| !line.starts_with("| ---"))
        .collect();
    assert_eq!(rows.len(), KINDS);
    for row in rows {
        let tests: Vec<&str> = row
            .split('`')
            .skip(1)
            .step_by(2)
            .filter(|name| name.contains("::"))
            .collect();
        assert!(!tests.is_empty(), "no test in {row}");
        for test in tests {
            let (place, name) = test.rsplit_once("::").unwrap();
            let exists = if place == "http" {
                root.join(format!("tests/http/{name}.yaml")).is_file()
            } else {
                let source = fs::read_to_string(root.join(place)).unwrap_or_default();
                source.contains(&format!("fn {name}("))
            };
            assert!(exists, "there is no {test}");
        }
    }
}
