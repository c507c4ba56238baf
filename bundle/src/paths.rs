//! Relative paths as manifests and locks may hold them.

/// Why a text is no path below a directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PathError {
    /// It has no characters.
    #[error("is empty")]
    Empty,
    /// It starts at the root of a file system.
    #[error("is absolute, must be relative")]
    Absolute,
    /// It has a `..`.
    #[error("leaves the directory by `..`")]
    Leaves,
    /// It has a `.` or an empty component, so that one file could have two names.
    #[error("has an empty or `.` component")]
    NotNormal,
    /// It has a backslash, a colon or a control character, which mean different things on different systems.
    #[error("has a backslash, a colon or a control character")]
    Character,
    /// It is longer than every system can hold.
    #[error("is longer than {MAX_BYTES} bytes")]
    Long,
}

/// Longest path in bytes.
pub const MAX_BYTES: usize = 1024;

/// Whether a text names a file below a directory: relative, normal, `/` between components, the same on every system.
pub fn check_relative(path: &str) -> Result<(), PathError> {
    if path.is_empty() {
        return Err(PathError::Empty);
    }
    if path.len() > MAX_BYTES {
        return Err(PathError::Long);
    }
    if path.starts_with('/') {
        return Err(PathError::Absolute);
    }
    if path
        .chars()
        .any(|c| c == '\\' || c == ':' || c.is_control())
    {
        return Err(PathError::Character);
    }
    for component in path.split('/') {
        match component {
            ".." => return Err(PathError::Leaves),
            "." | "" => return Err(PathError::NotNormal),
            _ => {}
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_paths_below_the_directory_pass() {
        for (path, expected) in [
            ("model.onnx", Ok(())),
            ("a/b..c/..d", Ok(())),
            ("größe.json", Ok(())),
            ("", Err(PathError::Empty)),
            ("/etc/passwd", Err(PathError::Absolute)),
            ("../x", Err(PathError::Leaves)),
            ("a/../../x", Err(PathError::Leaves)),
            ("a//b", Err(PathError::NotNormal)),
            ("./a", Err(PathError::NotNormal)),
            ("a/", Err(PathError::NotNormal)),
            ("a\\..\\b", Err(PathError::Character)),
            ("C:x", Err(PathError::Character)),
            ("a\nb", Err(PathError::Character)),
            ("a\0b", Err(PathError::Character)),
        ] {
            assert_eq!(check_relative(path), expected, "{path:?}");
        }
        assert_eq!(
            check_relative(&"a".repeat(MAX_BYTES + 1)),
            Err(PathError::Long)
        );
    }
}
