//! What a person sees while files come in: a bar on a terminal, quiet lines elsewhere. All of it on standard error.

use std::io::{self, IsTerminal};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Where progress goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// Bars and lines, for people.
    Terminal,
    /// Lines only, for logs.
    Lines,
    /// Nothing.
    Silent,
}

impl Progress {
    /// Bars when standard error is a terminal, else lines.
    pub fn of_process() -> Self {
        if io::stderr().is_terminal() {
            Self::Terminal
        } else {
            Self::Lines
        }
    }

    /// Says one thing.
    pub fn line(self, text: &str) {
        if self != Self::Silent {
            eprintln!("{text}");
        }
    }

    /// A bar over a number of bytes; it disappears when it is dropped.
    pub fn bytes(self, label: &str, total_bytes: u64) -> Bar {
        let style = "{msg}  {wide_bar} {bytes}/{total_bytes}  {bytes_per_sec}  {eta}";
        self.bar(
            ProgressBar::with_draw_target(Some(total_bytes), self.target()),
            style,
            label,
        )
    }

    /// A sign of life for work whose end isn't known; it disappears when it is dropped.
    pub fn spinner(self, label: &str) -> Bar {
        let bar = self.bar(
            ProgressBar::with_draw_target(None, self.target()),
            "{spinner} {msg}  {elapsed}",
            label,
        );
        if self == Self::Terminal {
            bar.0.enable_steady_tick(Duration::from_millis(200));
        }
        bar
    }

    fn bar(self, bar: ProgressBar, style: &str, label: &str) -> Bar {
        bar.set_style(
            ProgressStyle::with_template(style).expect("the template is one of the two above"),
        );
        bar.set_message(label.to_owned());
        Bar(bar)
    }

    fn target(self) -> ProgressDrawTarget {
        if self == Self::Terminal {
            ProgressDrawTarget::stderr()
        } else {
            ProgressDrawTarget::hidden()
        }
    }
}

/// A bar that leaves no trace on the screen.
pub struct Bar(ProgressBar);

impl Bar {
    /// Bytes that are done.
    pub fn set(&self, bytes: u64) {
        self.0.set_position(bytes);
    }

    /// Bytes that were done just now.
    pub fn advance(&self, bytes: u64) {
        self.0.inc(bytes);
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}
