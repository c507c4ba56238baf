//! What a user may do with a path: asked of the kernel for the user of this process, worked out from owners and modes for another one.
//!
//! Access control lists, capabilities and security modules are not seen for another user.
//! Users and groups are read from `/etc/passwd` and `/etc/group`: a name service may block for minutes.

use std::fs::{self, File, Metadata};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use rustix::fs::{Access, StatVfsMountFlags};

use crate::facts::host::User;

/// What somebody wants to do with a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wanted {
    /// Read it.
    Read,
    /// Write to it, or make files in it.
    Write,
}

const EXECUTE_BIT: u32 = 1;
const STICKY_BIT: u32 = 0o1000;

impl Wanted {
    fn bit(self) -> u32 {
        match self {
            Self::Read => 4,
            Self::Write => 2,
        }
    }

    fn verb(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write to",
        }
    }
}

/// Number of the user of this process.
///
/// # Errors
///
/// The kernel gives this process no more files.
pub fn own_user_id() -> io::Result<u32> {
    // What a process makes belongs to its effective user; unlike files in /proc, a pipe can be had everywhere.
    let (pipe, _) = io::pipe()?;
    Ok(File::from(OwnedFd::from(pipe)).metadata()?.uid())
}

/// A user by number, with the name and groups that the files of this machine give it.
pub fn user(id: u32) -> User {
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
    user_in(id, &read("/etc/passwd"), &read("/etc/group"))
}

fn user_in(id: u32, passwd: &str, group: &str) -> User {
    let entry = passwd.lines().find_map(|line| {
        let fields: Vec<&str> = line.split(':').collect();
        let is_it = fields.get(2)?.parse() == Ok(id);
        is_it.then(|| Some((fields[0].to_owned(), fields.get(3)?.parse::<u32>().ok()?)))?
    });
    let Some((name, primary)) = entry else {
        // A number without an entry, as containers use it, has the group of root.
        return User {
            id,
            name: None,
            group_ids: vec![0],
        };
    };
    let mut group_ids = vec![primary];
    group_ids.extend(group.lines().filter_map(|line| {
        let fields: Vec<&str> = line.split(':').collect();
        let is_member = fields.get(3)?.split(',').any(|member| member == name);
        is_member.then(|| fields.get(2)?.parse::<u32>().ok())?
    }));
    User {
        id,
        name: Some(name),
        group_ids,
    }
}

/// Whether a user may do something with a path, or why not.
pub fn check(user: &User, is_own: bool, path: &Path, wanted: Wanted) -> io::Result<()> {
    if is_own {
        let access = match wanted {
            Wanted::Read => Access::READ_OK,
            Wanted::Write => Access::WRITE_OK,
        };
        return rustix::fs::access(path, access).map_err(io::Error::from);
    }
    let path = path.canonicalize()?;
    if wanted == Wanted::Write {
        // As the kernel answers who asks for itself.
        let mount = rustix::fs::statvfs(&path)?;
        if mount.f_flag.contains(StatVfsMountFlags::RDONLY) {
            return Err(io::Error::from(rustix::io::Errno::ROFS));
        }
    }
    let ancestors: Vec<&Path> = path.ancestors().skip(1).collect();
    for dir in ancestors.into_iter().rev() {
        let metadata = fs::metadata(dir)?;
        if !allows(user, &metadata, EXECUTE_BIT) {
            return Err(refusal(user, "enter", dir, &metadata));
        }
    }
    let metadata = fs::metadata(&path)?;
    if allows(user, &metadata, wanted.bit()) {
        Ok(())
    } else {
        Err(refusal(user, wanted.verb(), &path, &metadata))
    }
}

/// Whether a user may remove what is at `path` from its directory, or why not: of a directory that is sticky only owners may.
///
/// # Errors
///
/// The user may not, or nothing is there.
pub fn check_removal(user: &User, is_own: bool, path: &Path) -> io::Result<()> {
    let dir = path.parent().unwrap_or(Path::new("/"));
    check(user, is_own, dir, Wanted::Write)?;
    let (of_dir, of_file) = (fs::metadata(dir)?, fs::symlink_metadata(path)?);
    let is_owner = [of_dir.uid(), of_file.uid()].contains(&user.id);
    if of_dir.mode() & STICKY_BIT != 0 && user.id != 0 && !is_owner {
        return Err(refusal(user, "replace", path, &of_file));
    }
    Ok(())
}

fn allows(user: &User, metadata: &Metadata, bit: u32) -> bool {
    let shift = if metadata.uid() == user.id {
        6
    } else if user.group_ids.contains(&metadata.gid()) {
        3
    } else {
        0
    };
    user.id == 0 || (metadata.mode() >> shift) & bit != 0
}

fn refusal(user: &User, verb: &str, path: &Path, metadata: &Metadata) -> io::Error {
    io::Error::other(format!(
        "user {} may not {verb} {}, which has mode {:03o}, user {} and group {}",
        user.id,
        path.display(),
        metadata.mode() & 0o777,
        metadata.uid(),
        metadata.gid()
    ))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    const PASSWD: &str =
        "root:x:0:0:root:/root:/bin/sh\noutrider:x:990:991::/:/bin/false\nbroken\n";
    const GROUP: &str = "root:x:0:\noutrider:x:991:\nmodels:x:1200:alice,outrider\nbroken\n";

    #[test]
    fn the_user_of_this_process_is_the_owner_of_what_it_makes() {
        let file = tempfile::tempfile().unwrap();
        let owner = file.metadata().unwrap().uid();
        assert_eq!(own_user_id().unwrap(), owner);
    }

    #[test]
    fn a_user_has_its_groups_and_a_number_without_a_name_has_that_of_root() {
        let user = user_in(990, PASSWD, GROUP);
        assert_eq!(user.name.as_deref(), Some("outrider"));
        assert_eq!(user.group_ids, [991, 1200]);
        let nameless = user_in(4711, PASSWD, GROUP);
        assert_eq!((nameless.name, nameless.group_ids), (None, vec![0]));
    }

    #[test]
    fn only_owners_may_replace_what_is_in_a_sticky_directory() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("admin.sock");
        fs::write(&path, "").unwrap();
        let mode = |mode| {
            fs::set_permissions(dir.path(), fs::Permissions::from_mode(mode)).unwrap();
        };
        let user = |id| User {
            id,
            name: None,
            group_ids: vec![id],
        };
        let owner = fs::metadata(&path).unwrap().uid();
        for (of_dir, id, may) in [
            (0o777, 4_000_000, true),
            (0o1777, 4_000_000, false),
            (0o1777, owner, true),
            (0o755, 4_000_000, false),
        ] {
            mode(of_dir);
            let found = check_removal(&user(id), false, &path);
            assert_eq!(found.is_ok(), may, "{of_dir:o} {id}: {found:?}");
        }
    }

    #[test]
    fn nobody_writes_to_a_mount_that_is_for_reading() {
        let mounts = fs::read_to_string("/proc/self/mounts").unwrap();
        let for_reading = mounts.lines().find_map(|line| {
            let fields: Vec<&str> = line.split(' ').collect();
            let is_it = fields.get(3)?.split(',').any(|option| option == "ro");
            let place = Path::new(fields.get(1)?);
            (is_it && place.is_dir()).then(|| place.to_owned())
        });
        // Where no mount is for reading alone there is nothing to ask.
        if let Some(place) = for_reading {
            let root = User::default();
            let refusal = check(&root, false, &place, Wanted::Write).unwrap_err();
            assert_eq!(refusal.kind(), io::ErrorKind::ReadOnlyFilesystem);
        }
    }

    #[test]
    fn another_user_is_held_to_modes_of_the_file_and_of_every_directory_above() {
        let dir = tempfile::tempdir().unwrap();
        let inner = dir.path().join("inner");
        fs::create_dir(&inner).unwrap();
        let file = inner.join("weights");
        fs::write(&file, "").unwrap();
        let mode = |path: &Path, mode| {
            fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
        };
        mode(dir.path(), 0o755);
        // Nobody's number and nobody's group.
        let stranger = User {
            id: 4_000_000,
            name: None,
            group_ids: vec![4_000_000],
        };
        let check = |wanted| check(&stranger, false, &file, wanted);
        for (of_dir, of_file, reads, writes) in [
            (0o755, 0o644, true, false),
            (0o755, 0o666, true, true),
            (0o755, 0o640, false, false),
            (0o750, 0o666, false, false),
            (0o711, 0o604, true, false),
        ] {
            mode(&inner, of_dir);
            mode(&file, of_file);
            assert_eq!(check(Wanted::Read).is_ok(), reads, "{of_dir:o} {of_file:o}");
            assert_eq!(
                check(Wanted::Write).is_ok(),
                writes,
                "{of_dir:o} {of_file:o}"
            );
        }
        mode(&inner, 0o700);
        let refusal = check(Wanted::Read).unwrap_err().to_string();
        assert!(refusal.contains("may not enter"), "{refusal}");
        mode(&inner, 0o755);
    }
}
