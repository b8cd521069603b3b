//! Listening: sessions and lanes that peers open.

use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;

use crossrail_handshake::{self as handshake, Arrival, Device, Identity, LaneName, Parameters, Rail, Session, Stream};
use crossrail_tcp::Binding;
use crossrail_topology::NetDevice;
use crossrail_types::{EndpointId, Error, ErrorKind, Result};

use super::dialling::binding;
use super::transport::Transport;
use super::{Sessions, generation_of, over_rails};
use crate::core::gpu::Reach;

/// A listening address, with the device that the zone of a link-local one names.
fn control_binding(address: SocketAddr) -> Result<Binding> {
    let device = match address {
        SocketAddr::V6(v6) if v6.scope_id() != 0 => {
            let name = nix::net::if_::if_indextoname(v6.scope_id()).map_err(|error| {
                Error::new(
                    ErrorKind::Usage,
                    "listen",
                    format!("{address}: no device has the number of its zone: {error}"),
                )
            })?;
            Some(name.to_string_lossy().into_owned())
        }
        _ => None,
    };
    Ok(Binding { device, address: address.ip() })
}

impl Sessions {
    // ---- listening

    /// Starts accepting peers.
    pub(crate) fn listen(self: &Arc<Self>) -> Result<()> {
        let settings = self.environment.settings();
        let transports = self.transports.allowed(settings);
        let parameters = Parameters {
            chunk: settings.chunk as u64,
            window: settings.window,
            channels: settings.channels.first(),
            channels_max: self.environment.tcp_limits().channels,
            checksum: settings.checksum,
            node: settings.node.clone(),
        };
        let me = Identity::new(self.options.name.clone(), self.secret.clone(), transports.clone(), parameters)?;
        let is_allowed = |transport: &&Arc<dyn Transport>| transports.iter().any(|name| name == transport.name());
        let listens = self.transports.iter().filter(is_allowed).any(|transport| transport.listens_on_rails());
        let unix = self.transports.over_unix().filter(is_allowed).is_some();
        let (mut control, port) = self.control_bindings()?;
        let asked = self.options.addresses.is_some() || settings.control_device.is_some();
        if unix && self.options.unix && !asked && !self.environment.nics().iter().any(|nic| nic.loopback && nic.up) {
            // Without loopback the Unix socket is left, for shared memory.
            self.log.info(format_args!("loopback is down: listening on a Unix socket only"));
            control.clear();
        }
        let rails = if listens { self.rails_to_listen_on(&control)? } else { Vec::new() };
        let config = handshake::ListenConfig {
            unix: self.options.unix && unix,
            control,
            port,
            rails,
            ports: settings.ports,
            limits: handshake::Limits::default(),
            require_token: false,
        };
        let keys = Arc::downgrade(self);
        let lane_keys = move |session: &[u8; 16]| keys.upgrade()?.control.key(session);
        let target = Arc::downgrade(self);
        let deliver = move |arrival| {
            if let Some(sessions) = target.upgrade() {
                sessions.arrival(arrival);
            }
        };
        let listener = handshake::Listener::start(config, me, Box::new(lane_keys), Box::new(deliver))?;
        self.progress.named(&listener.identity().hello.name);
        *self.identity.lock() = Some(listener.identity());
        *self.listener.lock() = Some(listener);
        Ok(())
    }

    /// The addresses of the rails to listen on, for a worker that takes sessions at those of `control`.
    fn rails_to_listen_on(&self, control: &[Binding]) -> Result<Vec<Rail>> {
        let beyond = control.iter().any(|binding| !binding.address.is_loopback());
        let named = self.environment.settings().net_devices != crossrail_types::Rails::default();
        // Rails listen only on loopback unless the worker itself listens beyond it, or the user names the devices.
        let listens = |device: &NetDevice| device.loopback || beyond || named;
        let rails = self.environment.rails()?.into_iter().filter(listens).flat_map(|device| {
            let speed_mbps = device.speed_mbps;
            device.addresses.clone().into_iter().map(move |address| Rail {
                name: device.name.clone(),
                binding: binding(&device, address),
                speed_mbps,
            })
        });
        Ok(rails.collect())
    }

    /// Addresses of this machine have changed: listens on those that the rails have now, announces them to all peers,
    /// and dials lost rails from and to the new ones.
    pub(super) fn addresses_changed(&self) {
        if let Err(error) = self.environment.rediscover() {
            return self.log.debug(format_args!("addresses have changed; the rails stay as they are: {error}"));
        }
        let devices = {
            let listener = self.listener.lock();
            let Some(listener) = listener.as_ref().filter(|listener| !listener.devices().is_empty()) else { return };
            let before = listener.devices();
            let rails = self.control_bindings().and_then(|(control, _)| self.rails_to_listen_on(&control));
            match rails.and_then(|rails| listener.listen_on(&rails)) {
                Ok(()) => {}
                Err(error) => return self.log.info(format_args!("cannot listen on new addresses: {error}")),
            }
            let me = listener.identity();
            let devices = me.hello.devices.clone();
            *self.identity.lock() = Some(me);
            if devices == before {
                return;
            }
            devices
        };
        let list = devices.iter().filter(|device| !device.loopback).map(|device| device.address.to_string());
        self.log.info(format_args!("the rails' addresses are {} now", list.collect::<Vec<_>>().join(", ")));
        for endpoint in self.control.announce_devices(&devices) {
            self.pair_again(endpoint);
        }
        self.redialer.nudge();
    }

    /// Finds the rails of an endpoint again, by the devices that both ends have now.
    pub(super) fn pair_again(&self, endpoint: EndpointId) {
        self.control.pair_again(endpoint, &self.environment.rails().unwrap_or_default());
    }

    fn control_bindings(&self) -> Result<(Vec<Binding>, u16)> {
        if let Some(listen) = &self.options.addresses {
            let port = listen.first().map_or(0, SocketAddr::port);
            if listen.iter().any(|address| address.port() != port) {
                return Err(Error::new(ErrorKind::Usage, "listen", "all addresses must have the same port"));
            }
            return Ok((listen.iter().map(|address| control_binding(*address)).collect::<Result<_>>()?, port));
        }
        if let Some(binding) = self.control_device()? {
            return Ok((vec![binding], 0));
        }
        Ok((vec![Binding { device: None, address: crossrail_types::loopback() }], 0))
    }

    /// The device that control connections are bound to, if the settings name one.
    pub(crate) fn control_device(&self) -> Result<Option<Binding>> {
        let Some(name) = &self.environment.settings().control_device else { return Ok(None) };
        let filter = crossrail_types::Filter::Only(vec![name.clone()]);
        let devices = crossrail_topology::select(&filter, &self.environment.nics()).map_err(|mut error| {
            error.operation = "CROSSRAIL_CONTROL_DEVICE".to_owned();
            error
        })?;
        Ok(devices.first().map(|device| binding(device, device.address)))
    }

    fn arrival(self: &Arc<Self>, arrival: Arrival) {
        if self.progress.is_closing() {
            return;
        }
        match arrival {
            Arrival::Session(session) => {
                let peer = session.peer.name.clone();
                if super::crowd::is_overrun(self) {
                    self.log.warn(format_args!("{peer} did not get through: too many peers wait to be accepted"));
                    return;
                }
                if let Some(old) = &session.peer.replaces {
                    self.replaced(old);
                }
                let result = match (&session.stream, self.transports.over_unix()) {
                    (Stream::Unix(_), Some(transport)) => transport.accept(self, session),
                    // Its announcement will tell which transport it is for.
                    _ => self.add_unannounced(session),
                };
                if let Err(error) = result {
                    self.log.warn(format_args!("{peer} did not get through: {error}"));
                }
                super::crowd::check(self);
            }
            Arrival::Lane { session, lane, stream, local, remote } => {
                if let Err(error) = self.lane_arrived(&session, lane, stream, (local, remote)) {
                    self.log.warn(format_args!("a lane from {remote} was dropped: {error}"));
                }
            }
            Arrival::Rejected { from, error } => {
                if self.control.is_first(error.kind) {
                    self.log.warn(format_args!("turned away {from}: {error}"));
                } else {
                    self.log.debug(format_args!("turned away {from}: {error}"));
                }
            }
        }
    }

    fn lane_arrived(
        self: &Arc<Self>,
        session: &[u8; 16],
        lane: LaneName,
        stream: TcpStream,
        (local, remote): (SocketAddr, SocketAddr),
    ) -> Result<()> {
        let device = {
            let listener = self.listener.lock();
            let devices = listener.as_ref().map_or_else(Vec::new, |listener| listener.devices());
            let came_to = |device: &&Device| device.port == local.port() && device.address == local.ip().to_canonical();
            devices.iter().find(came_to).map(|device| device.name.clone())
        };
        let device = device.unwrap_or_else(|| local.ip().to_string());
        over_rails::lane_arrived(
            self,
            session,
            lane,
            stream,
            over_rails::Route { device, local: local.ip(), remote: remote.ip() },
        )
    }

    /// Adds an endpoint for a peer that has connected over TCP; its transport adds lanes once it is announced.
    fn add_unannounced(&self, session: Session) -> Result<()> {
        let reach = Reach::Staged("only endpoints over shm can".to_owned());
        let endpoint = self.add_peer(&session.peer.name, generation_of(&session.peer), reach)?;
        self.keep_control(endpoint, session, false)
    }
}
