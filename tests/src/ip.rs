//! Creates links, addresses and routes in a sandbox, from commands in ip(8)'s syntax.
//!
//! A test runs dozens of these commands. Each command is sent as a netlink message over a socket in the
//! sandbox, because it takes long to start the `ip` program on an emulated machine.

use std::{
    fmt::Debug,
    io::{self, Read as _},
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use anyhow::{Context as _, Result, bail, ensure};
use rtnetlink::{
    LinkUnspec, RouteMessageBuilder,
    packet_core::{
        NLM_F_ACK, NLM_F_CREATE, NLM_F_EXCL, NLM_F_REQUEST, NetlinkDeserializable, NetlinkHeader,
        NetlinkMessage, NetlinkPayload, NetlinkSerializable,
    },
    packet_route::{
        AddressFamily, RouteNetlinkMessage,
        address::{AddressAttribute, AddressFlags, AddressMessage, AddressScope},
        link::{InfoData, InfoKind, InfoVeth, LinkAttribute, LinkInfo, LinkMessage},
        route::{RouteFlags, RouteMessage, RouteProtocol, RouteScope, RouteType},
    },
};
use socket2::{Domain, Protocol, Socket, Type};

use crate::sandbox::{RESPONSE_TIMEOUT, Sandbox};

/// `NETLINK_ROUTE`.
const ROUTE: i32 = 0;
/// `RT_TABLE_MAIN` and `RT_TABLE_LOCAL`.
const TABLE_MAIN: u32 = 254;
const TABLE_LOCAL: u32 = 255;
/// The size of the buffer for a response: large enough for a message about a link.
const MAX_RESPONSE: usize = 32 << 10;
pub(crate) const CHANGE_FLAGS: u16 = NLM_F_REQUEST | NLM_F_ACK;
const CREATE_FLAGS: u16 = CHANGE_FLAGS | NLM_F_CREATE | NLM_F_EXCL;

/// Runs the given commands, one per line. Supported commands are `link set L up`, `link add L type veth peer
/// name P netns PID`, `addr add A/N dev L [scope link] [nodad]`, `addr del A/N dev L` and `route
/// add|del [unreachable|local] A/N|default [via A] [dev L] [src A] [onlink]`.
pub(crate) fn run_commands(sandbox: &Sandbox, commands: &str) -> Result<()> {
    let socket = sandbox
        .socket_with_protocol(
            Domain::from(nix::libc::AF_NETLINK),
            Type::RAW,
            Protocol::from(ROUTE),
        )
        .context("cannot open a netlink socket")?;
    let kernel = Netlink { socket };
    for command in commands.lines() {
        kernel
            .run(command)
            .with_context(|| format!("ip {command}"))?;
    }
    Ok(())
}

struct Netlink {
    socket: Socket,
}

impl Netlink {
    fn run(&self, command: &str) -> Result<()> {
        let words: Vec<&str> = command.split_whitespace().collect();
        match words[..] {
            ["link", "set", link, "up"] => {
                let message = LinkUnspec::new_with_index(self.index(link)?).up().build();
                self.change(RouteNetlinkMessage::SetLink(message), CHANGE_FLAGS)
            }
            [
                "link",
                "add",
                link,
                "type",
                "veth",
                "peer",
                "name",
                peer,
                "netns",
                pid,
            ] => {
                let message = veth(link, peer, pid.parse()?);
                self.change(RouteNetlinkMessage::NewLink(message), CREATE_FLAGS)
            }
            ["addr", "add", address, "dev", link, ref options @ ..] => {
                let mut message = address_message(prefix(address)?, options)?;
                message.header.index = self.index(link)?;
                self.change(RouteNetlinkMessage::NewAddress(message), CREATE_FLAGS)
            }
            ["addr", "del", address, "dev", link] => {
                let mut message = address_message(prefix(address)?, &[])?;
                message.header.index = self.index(link)?;
                self.change(RouteNetlinkMessage::DelAddress(message), CHANGE_FLAGS)
            }
            ["route", "add", ref words @ ..] => {
                let message = RouteNetlinkMessage::NewRoute(self.route(words)?);
                self.change(message, CREATE_FLAGS)
            }
            ["route", "del", ref words @ ..] => {
                let message = RouteNetlinkMessage::DelRoute(self.route(words)?);
                self.change(message, CHANGE_FLAGS)
            }
            _ => bail!("unsupported command"),
        }
    }

    fn route(&self, words: &[&str]) -> Result<RouteMessage> {
        let (kind, words) = match words {
            ["unreachable", rest @ ..] => (RouteType::Unreachable, rest),
            ["local", rest @ ..] => (RouteType::Local, rest),
            rest => (RouteType::Unicast, rest),
        };
        let [destination, options @ ..] = words else {
            bail!("the route has no destination");
        };
        let options = RouteOptions::parse(options)?;
        let to = match (*destination, options.via) {
            ("default", Some(IpAddr::V4(_))) => (Ipv4Addr::UNSPECIFIED.into(), 0),
            ("default", Some(IpAddr::V6(_))) => (Ipv6Addr::UNSPECIFIED.into(), 0),
            (given, _) => prefix(given)?,
        };
        let (scope, table) = if kind == RouteType::Local {
            (RouteScope::Host, TABLE_LOCAL)
        } else if kind == RouteType::Unicast && options.via.is_none() {
            (RouteScope::Link, TABLE_MAIN)
        } else {
            (RouteScope::Universe, TABLE_MAIN)
        };
        let mut route = RouteMessageBuilder::<IpAddr>::new()
            .destination_prefix(to.0, to.1)?
            .kind(kind)
            .scope(scope)
            .table_id(table)
            .protocol(RouteProtocol::Boot);
        if let Some(via) = options.via {
            route = route.gateway(via)?;
        }
        if let Some(link) = options.link {
            route = route.output_interface(self.index(link)?);
        }
        if let Some(source) = options.source {
            route = route.pref_source(source)?;
        }
        let mut route = route.build();
        if options.is_onlink {
            route.header.flags |= RouteFlags::Onlink;
        }
        Ok(route)
    }

    /// Returns a link's index.
    fn index(&self, link: &str) -> Result<u32> {
        let message = LinkUnspec::new_with_name(link).build();
        let message = RouteNetlinkMessage::GetLink(message);
        let response = request(&self.socket, message, NLM_F_REQUEST);
        match response.with_context(|| format!("link {link}"))? {
            Some(RouteNetlinkMessage::NewLink(link)) => Ok(link.header.index),
            unexpected => bail!("unexpected response about link {link}: {unexpected:?}"),
        }
    }

    fn change(&self, message: RouteNetlinkMessage, flags: u16) -> Result<()> {
        match request(&self.socket, message, flags)? {
            None => Ok(()),
            Some(unexpected) => bail!("unexpected response to a change: {unexpected:?}"),
        }
    }
}

/// Sends a request over a netlink socket. Returns the response, or `None` if it is only an acknowledgement.
pub(crate) fn request<T>(socket: &Socket, message: T, flags: u16) -> io::Result<Option<T>>
where
    T: Debug + NetlinkDeserializable + NetlinkSerializable,
{
    let mut header = NetlinkHeader::default();
    header.flags = flags;
    let mut message = NetlinkMessage::new(header, NetlinkPayload::InnerMessage(message));
    message.finalize();
    let mut bytes = vec![0; message.buffer_len()];
    message.serialize(&mut bytes);
    socket.set_read_timeout(Some(RESPONSE_TIMEOUT))?;
    socket.send(&bytes)?;
    let mut response = vec![0; MAX_RESPONSE];
    let length = (&*socket).read(&mut response)?;
    let response =
        NetlinkMessage::<T>::deserialize(&response[..length]).map_err(io::Error::other)?;
    if let NetlinkPayload::InnerMessage(inner) = response.payload {
        return Ok(Some(inner));
    }
    let NetlinkPayload::Error(error) = response.payload else {
        return Err(io::Error::other(format!(
            "unexpected netlink response: {response:?}"
        )));
    };
    error.code.map_or(Ok(None), |_| Err(error.to_io()))
}

/// The options after the destination in a route command.
#[derive(Debug, Default)]
struct RouteOptions<'a> {
    via: Option<IpAddr>,
    link: Option<&'a str>,
    source: Option<IpAddr>,
    is_onlink: bool,
}

impl<'a> RouteOptions<'a> {
    fn parse(mut words: &[&'a str]) -> Result<Self> {
        let mut options = Self::default();
        loop {
            words = match words {
                [] => return Ok(options),
                ["via", via, rest @ ..] => {
                    options.via = Some(via.parse()?);
                    rest
                }
                ["dev", link, rest @ ..] => {
                    options.link = Some(link);
                    rest
                }
                ["src", source, rest @ ..] => {
                    options.source = Some(source.parse()?);
                    rest
                }
                ["onlink", rest @ ..] => {
                    options.is_onlink = true;
                    rest
                }
                [unexpected, ..] => bail!("unsupported option `{unexpected}`"),
            }
        }
    }
}

/// Builds the request for a veth pair whose peer end is in the network namespace of process `pid`.
fn veth(link: &str, peer: &str, pid: u32) -> LinkMessage {
    let other = LinkUnspec::new_with_name(peer).setns_by_pid(pid).build();
    let info = vec![
        LinkInfo::Kind(InfoKind::Veth),
        LinkInfo::Data(InfoData::Veth(InfoVeth::Peer(other))),
    ];
    LinkUnspec::new_with_name(link)
        .append_extra_attribute(LinkAttribute::LinkInfo(info))
        .build()
}

fn address_message((address, length): (IpAddr, u8), options: &[&str]) -> Result<AddressMessage> {
    let mut message = AddressMessage::default();
    message.header.family = match address {
        IpAddr::V4(_) => AddressFamily::Inet,
        IpAddr::V6(_) => AddressFamily::Inet6,
    };
    message.header.prefix_len = length;
    message.attributes = vec![
        AddressAttribute::Local(address),
        AddressAttribute::Address(address),
    ];
    match options {
        [] => {}
        ["scope", "link"] => message.header.scope = AddressScope::Link,
        ["nodad"] => message
            .attributes
            .push(AddressAttribute::Flags(AddressFlags::Nodad)),
        unexpected => bail!("unsupported options {unexpected:?}"),
    }
    Ok(message)
}

/// Parses an address with a prefix length. Without a prefix length, the address gets its full length.
fn prefix(text: &str) -> Result<(IpAddr, u8)> {
    let (address, length) = text.split_once('/').unwrap_or((text, ""));
    let address: IpAddr = address
        .parse()
        .with_context(|| format!("{text} is not an address with an optional prefix length"))?;
    let max_length = if address.is_ipv4() { 32 } else { 128 };
    let length = if length.is_empty() {
        max_length
    } else {
        length.parse()?
    };
    ensure!(
        length <= max_length,
        "the prefix length of {text} is greater than {max_length}"
    );
    Ok((address, length))
}
