//! Stop strings, found in a text that arrives in portions of any size.
//!
//! A match is decided at the first character that completes any stop string, whatever the portions were; of several that are complete there, the
//! longest counts, so that no part of one is left over. The cost is linear in the text: one Knuth-Morris-Pratt automaton per string.

/// Holds back the end of a text while it could still become a stop string.
#[derive(Clone, Debug, Default)]
pub(super) struct StopMatcher {
    patterns: Vec<Pattern>,
    /// The end of the text that may be the beginning of a stop string.
    held: String,
    stopped: bool,
}

#[derive(Clone, Debug)]
struct Pattern {
    text: Vec<u8>,
    /// For each prefix of `text`, the length of its longest proper prefix that is also its suffix.
    borders: Vec<usize>,
    /// Length of the longest prefix of `text` the text seen so far ends with.
    matched: usize,
}

impl StopMatcher {
    pub(super) fn new(stop: &[String]) -> Self {
        let patterns = stop
            .iter()
            .filter(|text| !text.is_empty())
            .map(|text| Pattern::new(text))
            .collect();
        Self {
            patterns,
            ..Self::default()
        }
    }

    pub(super) fn stopped(&self) -> bool {
        self.stopped
    }

    /// Takes the next portion and returns the text that is now known to come before any stop string. After a match nothing comes any more.
    pub(super) fn push(&mut self, portion: &str) -> String {
        if self.stopped {
            return String::new();
        }
        let seen = self.held.len();
        self.held.push_str(portion);
        for end in seen..self.held.len() {
            let byte = self.held.as_bytes()[end];
            let complete = self
                .patterns
                .iter_mut()
                .filter_map(|pattern| pattern.step(byte))
                .max();
            if let Some(length) = complete {
                self.stopped = true;
                self.held.truncate(end + 1 - length);
                return std::mem::take(&mut self.held);
            }
        }
        let open = self
            .patterns
            .iter()
            .map(|pattern| pattern.matched)
            .max()
            .unwrap_or(0);
        let rest = self.held.split_off(self.held.len() - open);
        std::mem::replace(&mut self.held, rest)
    }

    /// Ends the text and returns what was held back.
    pub(super) fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

impl Pattern {
    fn new(text: &str) -> Self {
        let text = text.as_bytes().to_vec();
        let mut borders = vec![0; text.len()];
        for end in 1..text.len() {
            let mut border = borders[end - 1];
            while border > 0 && text[border] != text[end] {
                border = borders[border - 1];
            }
            borders[end] = border + usize::from(text[border] == text[end]);
        }
        Self {
            text,
            borders,
            matched: 0,
        }
    }

    /// Takes one byte; the length of the pattern if that completes it.
    fn step(&mut self, byte: u8) -> Option<usize> {
        while self.matched > 0 && self.text[self.matched] != byte {
            self.matched = self.borders[self.matched - 1];
        }
        if self.text[self.matched] == byte {
            self.matched += 1;
        }
        (self.matched == self.text.len()).then_some(self.matched)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The whole-text definition: cut where the first stop string to be complete begins, the longest of several that are complete at once.
    fn naive(text: &str, stop: &[String]) -> (String, bool) {
        for end in 1..=text.len() {
            let Some(seen) = text.get(..end) else {
                continue;
            };
            let complete = stop
                .iter()
                .filter(|stop| !stop.is_empty() && seen.ends_with(stop.as_str()));
            if let Some(length) = complete.map(String::len).max() {
                return (seen[..end - length].to_owned(), true);
            }
        }
        (text.to_owned(), false)
    }

    fn streamed(portions: &[&str], stop: &[String]) -> (String, bool) {
        let mut matcher = StopMatcher::new(stop);
        let mut text = String::new();
        for portion in portions {
            text.push_str(&matcher.push(portion));
        }
        text.push_str(&matcher.finish());
        (text, matcher.stopped())
    }

    #[test]
    fn stop_text_never_appears() {
        for (portions, stop, expected, stopped) in [
            (
                vec!["The capital is Paris."],
                vec!["Pari"],
                "The capital is ",
                true,
            ),
            (
                vec!["The capital is Par", "is."],
                vec!["Pari"],
                "The capital is ",
                true,
            ),
            (vec!["a", "a", "a", "b"], vec!["aab"], "a", true),
            (vec!["aaab"], vec!["aab"], "a", true),
            (vec!["abcabcabd!"], vec!["abcabd"], "abc", true),
            (vec!["x\n", "\n", "\ny"], vec!["\n\n"], "x", true),
            (vec!["x\n", "y\n"], vec!["\n\n"], "x\ny\n", false),
            (vec!["日本", "語の"], vec!["本語"], "日", true),
            (vec!["👍", "🏽 ok"], vec!["👍🏽"], "", true),
            (vec!["abc"], vec!["bc", "abc"], "", true),
            (vec!["abcd"], vec!["abcd", "bc"], "a", true),
            (vec!["END"], vec!["END of", "END"], "", true),
            (vec!["nothing here"], vec![], "nothing here", false),
            (vec!["nothing here"], vec![""], "nothing here", false),
        ] {
            let stop: Vec<String> = stop.into_iter().map(str::to_owned).collect();
            assert_eq!(
                streamed(&portions, &stop),
                (expected.to_owned(), stopped),
                "{portions:?} with {stop:?}"
            );
        }
    }

    #[test]
    fn only_what_may_become_a_stop_string_is_held_back() {
        let mut matcher = StopMatcher::new(&["</answer>".to_owned(), "\n\n".to_owned()]);
        assert_eq!(matcher.push("one <"), "one ");
        assert_eq!(matcher.push("b"), "<b");
        assert_eq!(matcher.push(" two\n"), " two");
        assert_eq!(matcher.push("three"), "\nthree");
        assert_eq!(matcher.finish(), "");
    }

    proptest! {
        #[test]
        fn portions_do_not_matter(
            portions in prop::collection::vec("[ab语\n]{0,4}", 0..20),
            stop in prop::collection::vec("[ab语\n]{0,4}", 0..4),
        ) {
            let text = portions.concat();
            let portions: Vec<&str> = portions.iter().map(String::as_str).collect();
            prop_assert_eq!(streamed(&portions, &stop), naive(&text, &stop));
        }

        #[test]
        fn any_text_and_stop_strings_are_taken(text in any::<String>(), stop in prop::collection::vec(any::<String>(), 0..4)) {
            prop_assert_eq!(streamed(&[&text], &stop), naive(&text, &stop));
        }
    }
}
