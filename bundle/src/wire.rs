//! Walks a protobuf message in a file field by field, without holding more of it than the caller asks for.
//!
//! A decoder that builds the whole message can be made to allocate many times the size of its input; this one allocates nothing by itself.
//! Format: Protocol Buffers, "Encoding". Groups, which proto3 doesn't have, are refused.

use std::io::{self, BufRead, BufReader, Read, Seek};

use prost::Message;

/// Why bytes are no message.
#[derive(Debug, thiserror::Error)]
pub enum WireError {
    /// Reading failed.
    #[error("reading failed")]
    Read(#[from] io::Error),
    /// The bytes break the encoding.
    #[error("not a protobuf message: {problem} at byte {offset}")]
    Malformed {
        /// What is wrong.
        problem: &'static str,
        /// Where.
        offset: u64,
    },
    /// A part is larger than any honest file has it.
    #[error("{what} at byte {offset} is over the limit of {limit}")]
    Limit {
        /// The part.
        what: &'static str,
        /// Where.
        offset: u64,
        /// The largest that is read.
        limit: u64,
    },
}

/// One field of a message.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Field {
    /// Field number.
    pub(crate) number: u64,
    /// Its value, or where it is.
    pub(crate) value: Value,
    /// Offset of what follows the field.
    pub(crate) next: u64,
}

/// Value of a field.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Value {
    /// A variable-length integer.
    Varint(u64),
    /// Length-delimited content between the current position and this offset.
    Bytes {
        /// First byte after the content.
        end: u64,
    },
    /// A fixed-width number, which no field of interest is.
    Fixed,
}

/// A position in a message.
pub(crate) struct Wire<R> {
    reader: BufReader<R>,
    position: u64,
}

impl<R: Read + Seek> Wire<R> {
    pub(crate) fn new(reader: R) -> Self {
        Self {
            reader: BufReader::with_capacity(1 << 16, reader),
            position: 0,
        }
    }

    /// The next field of a message that ends at `end`, with the offset of the field after it; `None` at the end.
    pub(crate) fn next_field(&mut self, end: u64) -> Result<Option<Field>, WireError> {
        if self.position >= end {
            return Ok(None);
        }
        let key = self.varint(end)?;
        let (value, next) = match key & 7 {
            0 => (Value::Varint(self.varint(end)?), self.position),
            1 => (Value::Fixed, self.advanced(8, end)?),
            2 => {
                let length = self.varint(end)?;
                let next = self.advanced(length, end)?;
                (Value::Bytes { end: next }, next)
            }
            5 => (Value::Fixed, self.advanced(4, end)?),
            _ => return Err(self.malformed("unknown wire type")),
        };
        Ok(Some(Field {
            number: key >> 3,
            value,
            next,
        }))
    }

    /// Decodes the content up to `end` as one small message.
    pub(crate) fn message<M: Message + Default>(
        &mut self,
        end: u64,
        what: &'static str,
        limit: u64,
    ) -> Result<M, WireError> {
        let bytes = self.bytes(end, what, limit)?;
        M::decode(bytes.as_slice()).map_err(|_| self.malformed(what))
    }

    /// The content up to `end` as text.
    pub(crate) fn text(
        &mut self,
        end: u64,
        what: &'static str,
        limit: u64,
    ) -> Result<String, WireError> {
        String::from_utf8(self.bytes(end, what, limit)?).map_err(|_| self.malformed(what))
    }

    /// Bytes between the current position and `end`.
    pub(crate) fn remaining(&self, end: u64) -> u64 {
        end - self.position
    }

    /// An error about the current position.
    pub(crate) fn limit(&self, what: &'static str, limit: u64) -> WireError {
        WireError::Limit {
            what,
            offset: self.position,
            limit,
        }
    }

    /// A variable-length integer that ends before `end`.
    pub(crate) fn varint(&mut self, end: u64) -> Result<u64, WireError> {
        let mut value = 0u64;
        for shift in (0..70).step_by(7) {
            if self.position >= end {
                return Err(self.malformed("a number is cut off"));
            }
            let Some(&byte) = self.reader.fill_buf()?.first() else {
                return Err(self.malformed("the file ends early"));
            };
            self.reader.consume(1);
            self.position += 1;
            // The tenth byte holds the highest bit only; what is above it is dropped, as other readers do.
            value |= u64::from(byte & 0x7f) << shift;
            if byte & 0x80 == 0 {
                return Ok(value);
            }
        }
        Err(self.malformed("a number has more than ten bytes"))
    }

    fn bytes(&mut self, end: u64, what: &'static str, limit: u64) -> Result<Vec<u8>, WireError> {
        let length = self.remaining(end);
        if length > limit {
            return Err(self.limit(what, limit));
        }
        let mut bytes = vec![0; length as usize];
        self.reader.read_exact(&mut bytes)?;
        self.position = end;
        Ok(bytes)
    }

    fn advanced(&self, by: u64, end: u64) -> Result<u64, WireError> {
        match self.position.checked_add(by) {
            Some(next) if next <= end => Ok(next),
            _ => Err(self.malformed("a field is longer than what holds it")),
        }
    }

    /// Goes on at the offset `next`, which is not behind the current position.
    pub(crate) fn skip_to(&mut self, next: u64) -> Result<(), WireError> {
        debug_assert!(self.position <= next, "a visitor stays inside its field");
        let by = i64::try_from(next - self.position)
            .map_err(|_| self.malformed("a field is too long"))?;
        self.reader.seek_relative(by)?;
        self.position = next;
        Ok(())
    }

    /// An error about the current position.
    pub(crate) fn malformed(&self, problem: &'static str) -> WireError {
        WireError::Malformed {
            problem,
            offset: self.position,
        }
    }
}
