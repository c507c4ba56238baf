//! Files of a layer before they are written: paths, contents, links, and nothing that differs between machines.
//!
//! A tree has no times, owners or attributes, and three modes only: 0755 for directories and programs, 0644 for files, 0444 for weights.
//! It refuses paths that leave the root, and everything that is neither file, directory nor symbolic link.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

use outrider_bundle::manifest::FileEntry;

use crate::Error;

/// Where the bytes of a file come from.
#[derive(Clone, Debug)]
pub enum Content {
    /// Memory; for small files.
    Bytes(Vec<u8>),
    /// A file of this machine, which must have this size and digest when they are given.
    Path(PathBuf, Option<FileEntry>),
}

/// Permissions of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// 0444: weights, which nobody changes.
    ReadOnly,
    /// 0644.
    Plain,
    /// 0755.
    Executable,
}

impl Mode {
    /// The permission bits.
    pub fn bits(self) -> u32 {
        match self {
            Self::ReadOnly => 0o444,
            Self::Plain => 0o644,
            Self::Executable => 0o755,
        }
    }
}

/// What is at a path.
#[derive(Clone, Debug)]
pub enum Node {
    /// A file.
    File(Content, Mode),
    /// A symbolic link to this target.
    Link(String),
    /// A directory that is there for its own sake.
    Directory,
}

/// Files by path, without a leading `/`; the directories above a path are implied.
#[derive(Clone, Debug, Default)]
pub struct Tree {
    nodes: BTreeMap<String, Node>,
}

impl Tree {
    /// Puts something at a path. What was there is replaced, but for a directory with something in it.
    pub fn insert(&mut self, path: &str, node: Node) -> Result<(), Error> {
        check(path)?;
        for (index, _) in path.match_indices('/') {
            if matches!(
                self.nodes.get(&path[..index]),
                Some(Node::File(..) | Node::Link(_))
            ) {
                let problem = format!("is below {}, which is no directory", &path[..index]);
                return Err(Error::entry(path, problem));
            }
        }
        if !matches!(node, Node::Directory) && self.has_below(path) {
            return Err(Error::entry(path, "is a directory in the same layer"));
        }
        self.nodes.insert(path.to_owned(), node);
        Ok(())
    }

    /// Takes a path and everything below it away.
    pub fn remove(&mut self, path: &str) {
        self.nodes.retain(|known, _| !is_at_or_below(known, path));
    }

    /// What is at a path.
    pub fn get(&self, path: &str) -> Option<&Node> {
        self.nodes.get(path)
    }

    /// Every path with what is there, in the order of bytes; directories that are only implied aren't among them.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Node)> {
        self.nodes.iter().map(|(path, node)| (path.as_str(), node))
    }

    /// Whether nothing is in it.
    pub fn is_empty(&self) -> bool {
        self.nodes.is_empty()
    }

    fn has_below(&self, path: &str) -> bool {
        let prefix = format!("{path}/");
        self.nodes
            .range(prefix.clone()..)
            .next()
            .is_some_and(|(next, _)| next.starts_with(&prefix))
    }
}

impl Content {
    /// Size in bytes, as the lock or the file system says it.
    pub fn size_bytes(&self) -> Result<u64, Error> {
        match self {
            Self::Bytes(bytes) => Ok(bytes.len() as u64),
            Self::Path(_, Some(expected)) => Ok(expected.size_bytes),
            Self::Path(path, None) => fs::metadata(path)
                .map(|metadata| metadata.len())
                .map_err(|source| Error::read(path, source)),
        }
    }
}

/// Whether a path is another one or below it.
pub(crate) fn is_at_or_below(path: &str, top: &str) -> bool {
    path.strip_prefix(top)
        .is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

/// Like [`outrider_bundle::paths::check_relative`], but packages have files with a colon in their name.
fn check(path: &str) -> Result<(), Error> {
    let is_bad = |component: &str| matches!(component, "" | "." | "..");
    if path.split('/').any(is_bad) || path.chars().any(char::is_control) {
        return Err(Error::entry(
            path,
            "must be relative and normal, without `..` and control characters",
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file() -> Node {
        Node::File(Content::Bytes(Vec::new()), Mode::Plain)
    }

    #[test]
    fn a_path_cannot_leave_the_root_or_be_two_things() {
        let mut tree = Tree::default();
        tree.insert("a/b", file()).unwrap();
        tree.insert("l", Node::Link("a".to_owned())).unwrap();
        for path in [
            "", "/a", "../a", "a/../b", "a//b", "./a", "a\nb", "a/b/c", "l/x", "a",
        ] {
            tree.insert(path, file()).unwrap_err();
        }
        tree.insert("a", Node::Directory).unwrap();
        tree.insert("a::b", file()).unwrap();
    }

    #[test]
    fn removing_a_path_takes_what_is_below_and_not_what_begins_alike() {
        let mut tree = Tree::default();
        for path in ["usr/bin/x", "usr/binary", "usr/bin-y/z"] {
            tree.insert(path, file()).unwrap();
        }
        tree.remove("usr/bin");
        let left: Vec<_> = tree.iter().map(|(path, _)| path).collect();
        assert_eq!(left, ["usr/bin-y/z", "usr/binary"]);
    }
}
