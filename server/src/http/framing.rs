//! Where the heads and bodies of a connection's requests end, as the HTTP library reads them.
//!
//! What the library refuses is not judged here: it reads no further on such a connection, so that where the next head would begin is of no account.

use std::io;

const LINE_FEED: u8 = b'\n';
const CARRIAGE_RETURN: u8 = b'\r';

/// What the next bytes of a client are.
#[derive(Debug)]
pub enum Part {
    /// The head of a request; of the next one while a request is in flight.
    Head(Lines),
    /// Not known before the library has read the head that it was given whole.
    Unknown {
        /// Whether that head has line feeds without a carriage return before them.
        has_bare_line_feed: bool,
    },
    /// The body of the request that has begun.
    Body(Body),
}

impl Part {
    /// How many of these bytes belong to this part, which becomes the next one when they end it.
    ///
    /// # Errors
    ///
    /// See [`Body::take`].
    pub fn take(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::Head(lines) => {
                let Some(length) = lines.take(bytes) else {
                    return Ok(bytes.len());
                };
                let has_bare_line_feed = lines.has_bare_line_feed;
                *self = Self::Unknown { has_bare_line_feed };
                Ok(length)
            }
            Self::Unknown { .. } => Ok(0),
            Self::Body(body) => {
                let length = body.take(bytes)?;
                if body.is_complete() {
                    *self = Self::Head(Lines::default());
                }
                Ok(length)
            }
        }
    }

    /// What follows a head whose request has this body.
    pub fn behind_head(body: Body) -> Self {
        if body.is_complete() {
            Self::Head(Lines::default())
        } else {
            Self::Body(body)
        }
    }
}

/// Lines up to the first empty one; empty lines ahead of them belong to them.
#[derive(Debug, Default)]
pub struct Lines {
    /// Whether a byte has come.
    has_begun: bool,
    /// Whether an empty line is the end.
    has_text: bool,
    line_bytes: u64,
    is_behind_return: bool,
    has_bare_line_feed: bool,
}

impl Lines {
    /// Whether anything of them has come.
    pub fn has_begun(&self) -> bool {
        self.has_begun
    }

    /// How many of these bytes belong to them when they end here.
    fn take(&mut self, bytes: &[u8]) -> Option<usize> {
        self.has_begun |= !bytes.is_empty();
        for (position, &byte) in bytes.iter().enumerate() {
            if byte != LINE_FEED {
                self.line_bytes += 1;
                self.is_behind_return = byte == CARRIAGE_RETURN;
                continue;
            }
            let is_empty = self.line_bytes == u64::from(self.is_behind_return);
            self.has_bare_line_feed |= !self.is_behind_return;
            self.line_bytes = 0;
            self.is_behind_return = false;
            if is_empty && self.has_text {
                return Some(position + 1);
            }
            self.has_text |= !is_empty;
        }
        None
    }
}

/// The body of a request.
#[derive(Debug)]
pub enum Body {
    /// So many bytes are still to come.
    Sized(u64),
    /// Chunks, RFC 9112 section 7.1.
    Chunked(Chunks),
    /// All that comes: the connection is of no use for another request.
    Endless,
}

impl Body {
    /// How many of these bytes belong to it.
    ///
    /// # Errors
    ///
    /// A line behind the last chunk ends without a carriage return, which the library would read over.
    fn take(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::Sized(missing) => Ok(take_sized(missing, bytes)),
            Self::Chunked(chunks) => chunks.take(bytes),
            Self::Endless => Ok(bytes.len()),
        }
    }

    /// Whether nothing of it is still to come.
    pub fn is_complete(&self) -> bool {
        matches!(self, Self::Sized(0) | Self::Chunked(Chunks::Complete))
    }
}

fn take_sized(missing: &mut u64, bytes: &[u8]) -> usize {
    let length = usize::try_from(*missing).map_or(bytes.len(), |it| it.min(bytes.len()));
    *missing -= length as u64;
    length
}

/// Where in the chunks of a body its next byte is.
#[derive(Debug)]
pub enum Chunks {
    /// In the line that says how long a chunk is.
    Size {
        /// What its digits say so far.
        bytes: u64,
        /// Whether only digits have come.
        is_in_digits: bool,
        /// Whether the last byte was a carriage return.
        is_behind_return: bool,
    },
    /// Behind what the library does not take for a chunk: it reads no further.
    Refused,
    /// In a chunk or the line end behind it, of which so many bytes are still to come.
    Data(u64),
    /// In the lines behind the last chunk.
    Trailers(Lines),
    /// Behind it.
    Complete,
}

impl Default for Chunks {
    fn default() -> Self {
        Self::Size {
            bytes: 0,
            is_in_digits: true,
            is_behind_return: false,
        }
    }
}

impl Chunks {
    fn take(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut taken = 0;
        while let Some(&byte) = bytes.get(taken) {
            match self {
                Self::Size {
                    bytes: size,
                    is_in_digits,
                    is_behind_return,
                } => {
                    taken += 1;
                    let digit = char::from(byte).to_digit(16).filter(|_| *is_in_digits);
                    if let Some(digit) = digit {
                        // One that is too long for the library is too long for this.
                        *size = size.saturating_mul(16).saturating_add(digit.into());
                    } else if byte != LINE_FEED {
                        *is_in_digits = false;
                        *is_behind_return = byte == CARRIAGE_RETURN;
                    } else if !*is_behind_return {
                        *self = Self::Refused;
                    } else if *size > 0 {
                        *self = Self::Data(size.saturating_add(2));
                    } else {
                        *self = Self::Trailers(Lines {
                            has_text: true,
                            ..Lines::default()
                        });
                    }
                }
                Self::Data(missing) => {
                    taken += take_sized(missing, &bytes[taken..]);
                    if *missing == 0 {
                        *self = Self::default();
                    }
                }
                Self::Trailers(lines) => {
                    let end = lines.take(&bytes[taken..]);
                    if lines.has_bare_line_feed {
                        return Err(io::Error::new(
                            io::ErrorKind::InvalidData,
                            "a line behind the last chunk of a body ends without a carriage return",
                        ));
                    }
                    let Some(length) = end else {
                        return Ok(bytes.len());
                    };
                    *self = Self::Complete;
                    taken += length;
                }
                Self::Refused => return Ok(bytes.len()),
                Self::Complete => break,
            }
        }
        Ok(taken)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// How many of the bytes belong to a part, in whatever two pieces they come, and what it has become.
    fn end_of(make: impl Fn() -> Part, text: &str) -> (usize, Part) {
        let bytes = text.as_bytes();
        let whole = {
            let mut part = make();
            (part.take(bytes).unwrap(), part)
        };
        for split in 0..=bytes.len() {
            let (start, end) = bytes.split_at(split);
            let mut part = make();
            let mut taken = part.take(start).unwrap();
            if taken == split && split < whole.0 {
                taken += part.take(end).unwrap();
            }
            assert_eq!(taken, whole.0, "{text:?} split at {split}");
        }
        whole
    }

    #[test]
    fn a_head_ends_with_its_first_empty_line_and_its_line_ends_are_looked_at() {
        for (head, has_bare_line_feed) in [
            ("GET / HTTP/1.1\r\nhost: x\r\n\r\n", false),
            ("\r\n\r\nGET / HTTP/1.1\r\n\r\n", false),
            ("GET / HTTP/1.1\nhost: x\n\n", true),
            ("GET / HTTP/1.1\r\nhost: x\n\r\n", true),
            ("GET / HTTP/1.1\r\nhost: x\r\n\n", true),
            ("\nGET / HTTP/1.1\r\n\r\n", true),
        ] {
            for behind in ["", "GET", "\r\n", "\n"] {
                let text = format!("{head}{behind}");
                let (length, next) = end_of(|| Part::Head(Lines::default()), &text);
                assert_eq!(length, head.len(), "{text:?}");
                let Part::Unknown {
                    has_bare_line_feed: found,
                } = next
                else {
                    panic!("{text:?}: {next:?}")
                };
                assert_eq!(found, has_bare_line_feed, "{text:?}");
            }
        }
    }

    #[test]
    fn a_body_ends_where_its_length_or_its_last_chunk_says() {
        let sized = || Part::behind_head(Body::Sized(5));
        assert_eq!(end_of(sized, "helloGET").0, 5);
        assert!(matches!(Part::behind_head(Body::Sized(0)), Part::Head(_)));
        assert_eq!(end_of(|| Part::Body(Body::Endless), "hello\r\n\r\n").0, 9);
        for body in [
            "0\r\n\r\n",
            "5\r\nhello\r\n0\r\n\r\n",
            "5\r\n0\r\n\r\n\r\n0\r\n\r\n",
            "00A;name=\"ab\"\r\n0123456789\r\n1 \r\nx\r\n0;b\r\n\r\n",
            "1\r\nx\r\n0\r\nname: value\r\nother: 1\r\n\r\n",
        ] {
            let chunked = || Part::Body(Body::Chunked(Chunks::default()));
            for behind in ["", "GET / HTTP/1.1\r\n\r\n", "0\r\n\r\n"] {
                let text = format!("{body}{behind}");
                assert_eq!(end_of(chunked, &text).0, body.len(), "{text:?}");
            }
        }
    }

    /// How many of the bytes belong to a part, in pieces of so many each; `None` when they are refused.
    fn taken_in_pieces(mut part: Part, bytes: &[u8], piece_bytes: usize) -> Option<usize> {
        let begins_with_head = matches!(part, Part::Head(_));
        let mut taken = 0;
        for piece in bytes.chunks(piece_bytes) {
            taken += part.take(piece).ok()?;
            if matches!(part, Part::Head(_)) != begins_with_head
                || matches!(part, Part::Unknown { .. })
            {
                break;
            }
        }
        Some(taken)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]
        #[test]
        fn where_a_part_ends_does_not_depend_on_the_pieces_in_which_it_comes(
            text in "([05a;: xG]|\r\n|\r|\n){0,40}",
            piece_bytes in 1usize..20,
        ) {
            for make in [
                || Part::Head(Lines::default()),
                || Part::Body(Body::Chunked(Chunks::default())),
                || Part::Body(Body::Sized(10)),
                || Part::Body(Body::Endless),
            ] {
                let whole = taken_in_pieces(make(), text.as_bytes(), text.len().max(1));
                let pieces = taken_in_pieces(make(), text.as_bytes(), piece_bytes);
                prop_assert_eq!(whole, pieces, "{:?}", make());
            }
        }
    }

    #[test]
    fn behind_a_chunk_that_the_library_refuses_there_is_no_next_head() {
        let text = "5\r\nhello\r\n2\nab\n0\n\nGET / HTTP/1.1\r\n\r\n";
        let chunked = || Part::Body(Body::Chunked(Chunks::default()));
        let (length, part) = end_of(chunked, text);
        assert_eq!(length, text.len());
        assert!(matches!(part, Part::Body(_)), "{part:?}");
    }

    #[test]
    fn a_bare_line_feed_behind_the_last_chunk_is_refused() {
        for text in ["0\r\n\n", "0\r\nname: value\n\r\n", "0\r\n\r\r\nx: \n"] {
            let mut part = Part::Body(Body::Chunked(Chunks::default()));
            assert!(part.take(text.as_bytes()).is_err(), "{text:?}");
        }
    }
}
