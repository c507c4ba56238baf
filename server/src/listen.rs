//! The two listening sockets, bound before anything slow begins, and the limit of open files that their connections count against.

use std::fmt;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _, PermissionsExt as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use socket2::SockRef;

/// Connections that wait to be accepted; the system's own limit may be lower.
const BACKLOG: i32 = 4096;

/// Files that the server needs beside connections: libraries, weights, logs, the sockets of its threads.
const OTHER_FILES: u64 = 256;

/// Permissions of a socket file: who runs the server, and who is in its group.
const SOCKET_MODE: u32 = 0o660;

/// What the name of a socket begins with where an address may stand too.
pub const SOCKET_PREFIX: &str = "unix:";

/// Where to listen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Endpoint {
    /// An IP address and a port.
    Tcp(SocketAddr),
    /// A socket in the file system.
    Unix(PathBuf),
}

impl std::str::FromStr for Endpoint {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        match text.strip_prefix(SOCKET_PREFIX) {
            Some(path) if Path::new(path).is_absolute() => Ok(Self::Unix(path.into())),
            Some(_) => Err(()),
            None => text.parse().map(Self::Tcp).map_err(|_| ()),
        }
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address) => address.fmt(f),
            Self::Unix(path) => write!(f, "{SOCKET_PREFIX}{}", path.display()),
        }
    }
}

/// A bound socket.
#[derive(Debug)]
pub enum Listener {
    /// At an address.
    Tcp(TcpListener),
    /// In the file system.
    Unix(UnixListener, SocketFile),
}

impl Listener {
    /// Where it listens: the port that was chosen when 0 was asked for.
    pub fn endpoint(&self) -> io::Result<Endpoint> {
        match self {
            Self::Tcp(listener) => listener.local_addr().map(Endpoint::Tcp),
            Self::Unix(_, file) => Ok(Endpoint::Unix(file.path.clone())),
        }
    }
}

/// The file of a socket; it is removed when this is dropped, unless another server has put its own there.
#[derive(Debug)]
pub struct SocketFile {
    path: PathBuf,
    inode: u64,
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        let is_ours = std::fs::symlink_metadata(&self.path)
            .is_ok_and(|metadata| metadata.ino() == self.inode);
        if is_ours && let Err(error) = std::fs::remove_file(&self.path) {
            tracing::warn!(path = %self.path.display(), %error, "the socket cannot be removed");
        }
    }
}

/// Listens at `endpoint`.
///
/// # Errors
///
/// The address or the path can't be had; a socket on which nobody listens any more is replaced.
pub fn bind(endpoint: &Endpoint) -> io::Result<Listener> {
    match endpoint {
        Endpoint::Tcp(address) => bind_tcp(*address).map(Listener::Tcp),
        Endpoint::Unix(path) => bind_unix(path),
    }
}

/// Listens at an address.
///
/// # Errors
///
/// The address can't be had.
pub fn bind_tcp(address: SocketAddr) -> io::Result<TcpListener> {
    let listener = TcpListener::bind(address)?;
    // Listening once more is how the length of the queue is changed.
    SockRef::from(&listener).listen(BACKLOG)?;
    Ok(listener)
}

/// What [`check`] found.
#[derive(Debug)]
pub enum Checked {
    /// The address can be had, and is taken until this is dropped, so that another listener that wants it is found out.
    Tcp(TcpListener),
    /// Nothing is at the path.
    Free,
    /// A socket that nobody listens on any more is at the path, and would have to be replaced.
    Leftover,
}

/// Whether `endpoint` could be had now, and nothing is left behind: a path is only looked at.
///
/// # Errors
///
/// As [`bind`], but for what only making a socket in its directory would show.
pub fn check(endpoint: &Endpoint) -> io::Result<Checked> {
    match endpoint {
        Endpoint::Tcp(address) => TcpListener::bind(address).map(Checked::Tcp),
        Endpoint::Unix(path) => {
            // As binding would refuse it: the kernel's addresses are short.
            std::os::unix::net::SocketAddr::from_pathname(path)?;
            Ok(if leftover(path)? {
                Checked::Leftover
            } else {
                Checked::Free
            })
        }
    }
}

/// Whether a socket that nobody listens on any more lies at `path`.
///
/// # Errors
///
/// Something else is there, or another process listens.
fn leftover(path: &Path) -> io::Result<bool> {
    match std::fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        Err(error) => return Err(error),
        Ok(metadata) if !metadata.file_type().is_socket() => {
            return Err(io::Error::new(
                io::ErrorKind::AlreadyExists,
                "something that is not a socket is there",
            ));
        }
        Ok(_) => {}
    }
    match UnixStream::connect(path) {
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => Ok(true),
        Err(error) => Err(error),
        Ok(_) => Err(io::Error::new(
            io::ErrorKind::AddrInUse,
            "another process listens there",
        )),
    }
}

fn bind_unix(path: &Path) -> io::Result<Listener> {
    if leftover(path)? {
        std::fs::remove_file(path)?;
    }
    let listener = UnixListener::bind(path)?;
    let file = SocketFile {
        path: path.to_owned(),
        inode: std::fs::symlink_metadata(path)?.ino(),
    };
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(SOCKET_MODE))?;
    Ok(Listener::Unix(listener, file))
}

/// Lets the system cut a connection when its client takes nothing for `limit`.
///
/// The option counts the time that sent bytes are not acknowledged, or the client's window is closed, see `TCP_USER_TIMEOUT` in tcp(7).
///
/// # Errors
///
/// The system does not know the option.
pub fn set_write_timeout(connection: &impl AsFd, limit: Duration) -> io::Result<()> {
    SockRef::from(connection).set_tcp_user_timeout(Some(limit))
}

/// Raises the limit of open files as far as this process may, and says so when `max_connections` do not fit into it.
///
/// # Errors
///
/// The limit can't be read or raised.
pub fn prepare_for_connections(max_connections: usize) -> io::Result<()> {
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    if soft < hard {
        setrlimit(Resource::RLIMIT_NOFILE, hard, hard)?;
    }
    let needed = (max_connections as u64).saturating_add(OTHER_FILES);
    if hard < needed {
        tracing::warn!(
            max_connections,
            open_files_limit = hard,
            open_files_needed = needed,
            "serving.http.max_connections does not fit into the limit of open files; raise the limit, or connections are refused beyond it"
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_endpoint_is_an_address_or_an_absolute_path() {
        for text in ["127.0.0.1:80", "[::1]:80", "unix:/run/outrider/admin.sock"] {
            assert_eq!(text.parse::<Endpoint>().unwrap().to_string(), text);
        }
        for text in [
            "",
            "80",
            "localhost:80",
            "/run/x",
            "unix:",
            "unix:admin.sock",
        ] {
            assert!(text.parse::<Endpoint>().is_err(), "{text}");
        }
    }

    #[test]
    fn a_socket_is_for_its_owner_and_group_and_goes_with_its_server() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("admin.sock");
        let listener = bind(&Endpoint::Unix(path.clone())).unwrap();
        let mode = std::fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, SOCKET_MODE);
        assert!(UnixStream::connect(&path).is_ok());
        drop(listener);
        assert!(!path.exists());
    }

    #[test]
    fn only_a_socket_that_nobody_listens_on_is_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("admin.sock");
        let endpoint = Endpoint::Unix(path.clone());

        let running = bind(&endpoint).unwrap();
        assert_eq!(
            bind(&endpoint).unwrap_err().kind(),
            io::ErrorKind::AddrInUse
        );
        assert!(path.exists(), "the running server keeps its socket");
        // As after a crash: nobody listens, and the file is still there.
        let Listener::Unix(listener, file) = running else {
            unreachable!("the endpoint is a path")
        };
        drop(listener);
        std::mem::forget(file);
        let again = bind(&endpoint).unwrap();
        assert!(UnixStream::connect(&path).is_ok());
        drop(again);

        std::fs::write(&path, "a file that somebody needs").unwrap();
        assert_eq!(
            bind(&endpoint).unwrap_err().kind(),
            io::ErrorKind::AlreadyExists
        );
        assert!(path.exists());
    }

    #[test]
    fn a_socket_of_another_server_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("admin.sock");
        let first = bind(&Endpoint::Unix(path.clone())).unwrap();
        std::fs::remove_file(&path).unwrap();
        // A file that is kept open keeps its inode number from being given again.
        let _second = UnixListener::bind(&path).unwrap();
        drop(first);
        assert!(path.exists());
    }
}
