//! Peers that come to us: listening, and their sessions and lanes.

use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::Instant;

use crossrail_handshake::{self as handshake, Arrival, Identity, LaneName, Parameters, Rail, Stream};
use crossrail_shm::Side;
use crossrail_tcp::Binding;
use crossrail_types::{Error, ErrorKind, Result, Settings, TRANSPORTS};

use super::Sessions;
use super::control::{DIAL_MAX, binding};

impl Sessions {
    // ---- listening

    /// Starts accepting peers.
    pub(crate) fn listen(self: &Arc<Self>) -> Result<()> {
        let settings = self.environment.settings();
        let transports = allowed(settings);
        let parameters =
            Parameters { chunk: settings.chunk as u64, window: settings.window, channels: settings.channels };
        let me = Identity::new(self.options.name.clone(), self.secret.clone(), transports.clone(), parameters)?;
        let tcp = transports.iter().any(|name| name == "tcp");
        let (control, port) = self.control_bindings()?;
        let beyond = control.iter().any(|binding| !binding.address.is_loopback());
        let named = settings.net_devices != crossrail_types::Rails::default();
        let rails = if tcp { self.environment.rails()? } else { Vec::new() };
        // Rails listen where the worker itself does; further only where the user names them.
        let rails = rails.into_iter().filter(|device| device.loopback || beyond || named).flat_map(|device| {
            let speed_mbps = device.speed_mbps;
            device.addresses.clone().into_iter().map(move |address| Rail {
                name: device.name.clone(),
                binding: binding(&device, address),
                speed_mbps,
            })
        });
        let config = handshake::ListenConfig {
            unix: self.options.unix && transports.iter().any(|name| name == "shm"),
            control,
            port,
            rails: rails.collect(),
            limits: handshake::Limits::default(),
            require_token: false,
        };
        let keys = Arc::downgrade(self);
        let lane_keys =
            move |session: &[u8; 16]| keys.upgrade()?.control.sessions.lock().get(session).map(|link| link.ticket.key);
        let target = Arc::downgrade(self);
        let deliver = move |arrival| {
            if let Some(sessions) = target.upgrade() {
                sessions.arrival(arrival);
            }
        };
        let listener = handshake::Listener::start(config, me, Box::new(lane_keys), Box::new(deliver))?;
        *self.identity.lock() = Some(listener.identity().clone());
        *self.listener.lock() = Some(listener);
        Ok(())
    }

    fn control_bindings(&self) -> Result<(Vec<Binding>, u16)> {
        if let Some(listen) = &self.options.addresses {
            let port = listen.first().map_or(0, SocketAddr::port);
            if listen.iter().any(|address| address.port() != port) {
                return Err(Error::new(ErrorKind::Usage, "listen", "all addresses must have the same port"));
            }
            let bindings = listen.iter().map(|address| Binding { device: None, address: address.ip() });
            return Ok((bindings.collect(), port));
        }
        if let Some(binding) = self.control_device()? {
            return Ok((vec![binding], 0));
        }
        Ok((vec![Binding { device: None, address: std::net::Ipv4Addr::LOCALHOST.into() }], 0))
    }

    /// Where control connections are made from, if the settings say.
    pub(crate) fn control_device(&self) -> Result<Option<Binding>> {
        let Some(name) = &self.environment.settings().control_device else { return Ok(None) };
        let filter = crossrail_types::Filter::Only(vec![name.clone()]);
        let devices = crossrail_topology::select(&filter, self.environment.nics()).map_err(|mut error| {
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
                if let Some(old) = &session.peer.replaces {
                    self.replaced(old);
                }
                let result = match session.stream {
                    Stream::Unix(stream) => {
                        let deadline = Instant::now() + DIAL_MAX;
                        self.attach_shm(stream, Side::Acceptor, &session.peer, None, deadline)
                            .map(|endpoint| self.arrived(endpoint))
                    }
                    Stream::Tcp(control) => {
                        self.open_link(control, session.ticket, false, session.peer, Vec::new(), Vec::new()).map(drop)
                    }
                };
                if let Err(error) = result {
                    self.log.warn(format_args!("{peer} did not get through: {error}"));
                }
            }
            Arrival::Lane { session, lane, stream, local, remote } => {
                if let Err(error) = self.lane_arrived(&session, lane, stream, local) {
                    self.log.warn(format_args!("a lane from {remote} was dropped: {error}"));
                }
            }
            Arrival::Rejected { from, error } => {
                if self.control.said.lock().insert(error.kind) {
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
        local: SocketAddr,
    ) -> Result<()> {
        let device = {
            let listener = self.listener.lock();
            let devices = listener.as_ref().map_or(&[][..], |listener| listener.devices());
            devices.iter().find(|device| device.port == local.port()).map(|device| device.name.clone())
        };
        let device = device.unwrap_or_else(|| local.ip().to_string());
        let endpoint = match self.control.sessions.lock().get(session) {
            Some(link) => link.endpoint,
            None => return Err(Error::new(ErrorKind::Refused, "lane", "its session has ended")),
        };
        let interface = self.environment.rails()?.into_iter().find(|d| d.name == device).map(|d| d.interface);
        self.add_tcp_lane(endpoint, lane, stream, &device, interface)?;
        if let Some(link) = self.control.sessions.lock().get_mut(session) {
            link.lanes += 1;
        }
        self.check_ready(endpoint);
        Ok(())
    }
}

/// The transports that the settings allow, by name.
fn allowed(settings: &Settings) -> Vec<String> {
    TRANSPORTS.iter().filter(|name| settings.tls.allows(name)).map(|name| (*name).to_owned()).collect()
}
