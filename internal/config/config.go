// SPDX-License-Identifier: Apache-2.0

// Package config reads the configuration of agent and host peer from flags, the
// environment and a YAML file, in this order of precedence. One table of fields
// defines all three. A wrong value is refused with its position and with what is
// allowed.
package config

import (
	"fmt"
	"log/slog"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"github.com/fairlead/fairlead/internal/hvsock"
	"github.com/fairlead/fairlead/internal/names"
	"github.com/fairlead/fairlead/internal/rules"
)

// DefaultAgentFile is the agent's configuration file by default. It may be absent.
const DefaultAgentFile = "/etc/fairlead/agent.yaml"

// DefaultHostFile is the host peer's configuration file by default. It may be absent.
// For root on Linux it is the system's, otherwise the user's own; it is empty if the
// user has no home directory.
func DefaultHostFile() string { return in(currentDirs().config, "host.yaml") }

// Common holds the settings that agent and host share.
type Common struct {
	LinkToken   string     // file that holds the shared token of the link; empty for none; see TokenFileOf
	TokenGiven  bool       // LinkToken was set, so it is for unix sockets, too
	Control     string     // path of the control socket
	MetricsAddr string     // HOST:PORT of /metrics; empty for none
	WebAddr     string     // HOST:PORT of the page, a loopback address; empty for none
	LogLevel    slog.Level // slog.LevelDebug to slog.LevelError
	LogFormat   string     // "text" or "json"
	RulesFile   string     // file with more rules; empty for none
	// ForwardsFile is the file with the rules that were added while fairlead runs, which may
	// be absent; empty for none. See package forwards.
	ForwardsFile string
	// KeepPrivileges says that no capability is dropped after the start.
	KeepPrivileges bool

	// Rules is compiled from the rules in the file, then those in RulesFile, and
	// from what is exposed, and has those in ForwardsFile. It is never nil in what LoadAgent, LoadHost and the
	// defaults return.
	Rules *rules.Set

	files []file            // what was read
	from  map[string]string // where fields that are set got their value; see Setting
}

// Agent configures the guest agent.
type Agent struct {
	Common
	Link          []Endpoint        // at least one
	TLS           TLS               // of links over wss
	AllowCIDs     []uint32          // vsock peers that may connect
	AllowUIDs     []uint32          // unix peers that may connect, besides root and the agent's own user
	Sources       []string          // at least one of those that Sources returns, each once
	Sinks         []Sink            // at least one, each name once
	Observer      string            // "auto", "bpf" or "poll"
	PollInterval  time.Duration     // of the polling observer, 10ms to 1h
	AuditInterval time.Duration     // between dumps in the background, 10s to 24h; 0 for none
	AuditGiven    bool              // AuditInterval is exact, not the least
	EventBuffer   int               // KiB of events of sockets that the kernel queues: a power of two, 64 to 1048576; of NAT rules four times as many
	HoldDown      time.Duration     // how long a key without origins is kept, 0 to 1m
	Expose        rules.HostAddress // rules.Loopback or rules.All
	Labels        bool              // labels of containers and Services decide after the rules
	NAT           NAT
	Docker        Docker
	Podman        Podman
	Containerd    Containerd
	Kube          Kube
	Cluster       Cluster
	Listener      Listener
	Publish       Publish
	// BridgeLoopback opens ports of the guest's loopback to the peers of other products.
	BridgeLoopback bool
	// ReportUnpublished sends the host the ports that are denied, withheld or pending,
	// with their owners, and the NAT rules that are not understood.
	ReportUnpublished bool
	EngineGrace       time.Duration // how long declared ports outlive their engine, 1s to 24h; 0 for ever

	// ObserverMethods limits how the observer attaches, for tests: nothing in a file,
	// a flag or the environment sets it. Empty is no limit.
	ObserverMethods []string
}

// NAT configures the source that reads NAT rules.
type NAT struct {
	MaxPorts int // that one rule may publish, 1 to 65535
}

// Host configures the host peer.
type Host struct {
	Common
	Connect []Guest           // each name and each unnamed endpoint once; at least one unless the host listens
	Serving Serving           // how the host takes agents that dial it
	Bind    rules.HostAddress // where guest wildcards appear: rules.Asked leaves it to the agent
	Grace   time.Duration     // how long listeners outlive a lost guest, 0 to 1h
	LogFile string            // where the log goes; empty for standard error
	Limits  Limits
	Names   Names
}

// Limits bounds the resources that one guest may use on the host.
type Limits struct {
	Listeners int           // open at the same time, 1 to 65536
	Flows     int           // TCP connections at the same time, 1 to 1048576
	UDPFlows  int           // UDP clients at the same time, 1 to 1048576
	UDPIdle   time.Duration // after which a UDP client is forgotten, 1s to 1h
}

// Sources returns the names of all sources. By default all are enabled. Dial targets
// are tried in this order.
func Sources() []string {
	return []string{"socket", "nat", "docker", "podman", "containerd", "kube", "users"}
}

// DefaultAgent returns the agent's defaults.
func DefaultAgent() Agent {
	return Agent{
		Common: Common{
			LinkToken: "/var/lib/fairlead/token",
			Control:   "/run/fairlead/control.sock",
			LogFormat: "text",
			Rules:     rules.Empty(rules.Loopback()),

			ForwardsFile: "/var/lib/fairlead/forwards.yaml",
		},
		Link:          []Endpoint{{Network: "unix", Path: "/run/fairlead/link.sock"}},
		AllowCIDs:     []uint32{2}, // VMADDR_CID_HOST
		Sources:       Sources(),
		Sinks:         []Sink{{Name: "hostlink"}},
		Observer:      "auto",
		PollInterval:  time.Second,
		AuditInterval: time.Minute,
		EventBuffer:   2 << 10,
		HoldDown:      150 * time.Millisecond,
		Expose:        rules.Loopback(),
		NAT:           NAT{MaxPorts: 4096},
		Listener:      Listener{Settle: 750 * time.Millisecond},
		Cluster:       Cluster{Interval: 10 * time.Second},
		Publish:       Publish{Socket: "/run/fairlead/publish.sock", Ports: 8, Connections: 256, Requests: 10},
		EngineGrace:   30 * time.Second,

		ReportUnpublished: true,
	}
}

// DefaultHost returns the host's defaults for this user.
func DefaultHost() Host { return defaultHost(currentDirs()) }

func defaultHost(d hostDirs) Host {
	return Host{
		Common: Common{
			LinkToken: in(d.state, "token"),
			Control:   in(d.runtime, "host.sock"),
			LogFormat: "text",
			Rules:     rules.Empty(rules.Loopback()), // a guest widens nothing by itself

			ForwardsFile: in(d.state, "host-forwards.yaml"),
		},
		Connect: []Guest{{Endpoint: defaultConnect(runtime.GOOS, d)}},
		Bind:    rules.Loopback(),
		Grace:   10 * time.Second,
		Names:   Names{Domain: names.Local},
		Limits:  Limits{Listeners: 4096, Flows: 16384, UDPFlows: 4096, UDPIdle: time.Minute},
	}
}

// vsockPort is the agent's default vsock port. It is below 1024, so only root can
// listen on it.
const vsockPort = 1023

// defaultConnect is the default endpoint of a guest: the WSL 2 VM on Windows, the
// socket of an agent in another network namespace of the same kernel on Linux, a socket that the VM's manager
// forwards elsewhere.
func defaultConnect(goos string, d hostDirs) Endpoint {
	switch goos {
	case "windows":
		return Endpoint{Network: "hvsock", Machine: hvsock.WSL, Port: vsockPort}
	case "linux":
		return Endpoint{Network: "unix", Path: "/run/fairlead/link.sock"}
	}
	return Endpoint{Network: "unix", Path: in(d.runtime, "link.sock")}
}

// Flags sets c to the defaults and registers a flag for each field. Afterwards c
// holds the values of the flags and nothing else; LoadAgent, given fs, merges all.
func (c *Agent) Flags(fs *pflag.FlagSet) {
	*c = DefaultAgent()
	register(fs, c.fields())
}

// Flags sets c to the defaults and registers a flag for each field. Afterwards c
// holds the values of the flags and nothing else; LoadHost, given fs, merges all.
func (c *Host) Flags(fs *pflag.FlagSet) {
	*c = DefaultHost()
	register(fs, c.fields())
	fs.SetNormalizeFunc(func(_ *pflag.FlagSet, name string) pflag.NormalizedName {
		if name == "expose" { // the agent's name for it
			name = "bind"
		}
		return pflag.NormalizedName(name)
	})
}

func (c *Common) fields() []field {
	return []field{
		one("linkToken", "link-token", "file", &c.LinkToken, c.readToken, str,
			"file with the shared token of the link; unless it is set, unix sockets need none"),
		one("control", "control", "path", &c.Control, filePath(false), str, "path of the control socket"),
		one("metricsAddr", "metrics-addr", "host:port", &c.MetricsAddr, listenAddr, str,
			"serve /metrics at this address"),
		one("webAddr", "web-addr", "host:port", &c.WebAddr, loopbackAddr, str,
			"serve the status page at this loopback address; 'fairlead web' prints its URL"),
		one("logLevel", "log-level", "level", &c.LogLevel, level, levelName, "debug, info, warn or error").oneOf(logLevels()...),
		one("logFormat", "log-format", "format", &c.LogFormat, enum("text", "json"), str, "text or json").oneOf("text", "json"),
		one("rulesFile", "rules-file", "file", &c.RulesFile, filePath(true), str,
			"file with more rules, evaluated after those of the configuration"),
		one("forwardsFile", "forwards-file", "file", &c.ForwardsFile, filePath(true), str,
			"file of the rules that 'fairlead forward' adds, evaluated last and never wider than the others; empty for none"),
		one("keepPrivileges", "keep-privileges", boolKind, &c.KeepPrivileges, truth, strconv.FormatBool,
			"on Linux, keep all capabilities instead of dropping those that are not needed, for debugging"),
	}
}

// readToken reads the token's file and records that it was given.
func (c *Common) readToken(s string) (string, error) {
	path, err := filePath(true)(s)
	c.TokenGiven = c.TokenGiven || err == nil
	return path, err
}

// TokenFileOf returns the file with the token of a link, or "" if the link has none. A
// unix socket has one only if it was set: the system reports the users of both ends.
func (c *Common) TokenFileOf(e Endpoint) string {
	if e.Network == "unix" && !c.TokenGiven {
		return ""
	}
	return c.LinkToken
}

// TokenFileOf is that of Common, but for a link that a certificate proves.
func (c *Agent) TokenFileOf(e Endpoint) string {
	if e.Network == networkWSS && c.TLS.Cert != "" && !c.TokenGiven {
		return ""
	}
	return c.Common.TokenFileOf(e)
}

// TokenFile returns the file with the token, or "" if no link has one.
func (c *Agent) TokenFile() string {
	for _, e := range c.Link {
		if file := c.TokenFileOf(e); file != "" {
			return file
		}
	}
	return ""
}

func (c *Agent) fields() []field {
	return slices.Concat([]field{
		many("link", "link", "endpoint", &c.Link, ParseEndpoint, stringOf,
			"where to connect with the host: unix:///PATH, vsock://:PORT to listen, vsock://2:PORT or wss://SERVER[:PORT][/NAME] to dial").
			alias("CATTLE_SERVER", cattleServer),
		many("allowCIDs", "allow-cids", "cid", &c.AllowCIDs, whole[uint32](0, 1<<32-2), number,
			"vsock peers that may connect"),
		many("allowUIDs", "allow-uids", "uid", &c.AllowUIDs, whole[uint32](0, 1<<32-2), number,
			"users that may connect to a unix link, besides root and the agent's own"),
		many("source", "source", "source", &c.Sources, enum(Sources()...), str,
			"where to look for ports: "+strings.Join(Sources(), ", ")).oneOf(Sources()...),
		many("sink", "sink", "sink", &c.Sinks, ParseSink, stringOf,
			"where to publish ports: hostlink, listener, gvproxy[=URL], vtunnel[=URL]; auto detects the product, none only lists ports").
			oneOf(sinkNames()...).orMatching("^(gvproxy|vtunnel)="),
		one("observer", "observer", "mode", &c.Observer, enum("auto", "bpf", "poll"), str,
			"how to observe sockets: auto, bpf or poll").oneOf("auto", "bpf", "poll"),
		one("pollInterval", "poll-interval", "duration", &c.PollInterval,
			duration(10*time.Millisecond, time.Hour, false), stringOf, "interval of the polling observer"),
		one("auditInterval", "audit-interval", "duration", &c.AuditInterval,
			c.readAudit, stringOf, "interval of full dumps that check the events; 0: only after the start and after events were lost; by default up to 10m where dumps are expensive"),
		one("eventBuffer", "event-buffer", "n", &c.EventBuffer, powerOfTwo(64, 1<<20), number,
			"KiB of socket events that the kernel queues for the agent, a power of two; of changed NAT rules it queues four times as much, at most 1 GiB").atLeast(64),
		one("holdDown", "hold-down", "duration", &c.HoldDown,
			duration(0, time.Minute, false), stringOf, "how long a port that disappeared stays published"),
		one("expose", "expose", "where", &c.Expose, rules.ParseExpose, stringOf,
			"host addresses of ports that listen on all guest addresses: loopback or all").oneOf("loopback", "all"),
		one("labels", "labels", boolKind, &c.Labels, truth, strconv.FormatBool,
			"obey the labels fairlead.expose, fairlead.host-port and fairlead.name of containers, and such annotations of Services"),
		one("nat.maxPorts", "nat-max-ports", "n", &c.NAT.MaxPorts, whole[int](1, 1<<16-1), number,
			"maximum of ports that one NAT rule publishes; a rule for more is listed by doctor").atLeast(1),
	}, c.tlsFields(), c.engineFields(), c.clusterFields(), c.listenerFields(), c.publishFields(), c.debugAlias(c.Common.fields()))
}

// debugAlias lets a variable of older agents set the log level.
func (*Agent) debugAlias(fields []field) []field {
	for i := range fields {
		if fields[i].key == "logLevel" {
			fields[i] = fields[i].alias("CATTLE_DEBUG", cattleDebug)
		}
	}
	return fields
}

// readAudit reads the interval and records that it was given.
func (c *Agent) readAudit(s string) (time.Duration, error) {
	d, err := duration(10*time.Second, 24*time.Hour, true)(s)
	c.AuditGiven = c.AuditGiven || err == nil
	return d, err
}

func (c *Host) fields() []field {
	return slices.Concat([]field{
		many("connect", "connect", "[name=]endpoint", &c.Connect, ParseGuest, stringOf,
			"where the agent is: unix:///PATH, vsock://CID:PORT, on Windows hvsock://wsl:PORT or hvsock://ID:PORT; NAME= before it names the guest"),
		one("bind", "bind", "where", &c.Bind, parseBind, stringOf,
			"host addresses of ports that listen on all guest addresses: asked (by the agent), loopback, all or an address").
			oneOf("asked", "loopback", "all").orMatching("[.:]"),
		one("grace", "grace", "duration", &c.Grace, duration(0, time.Hour, false), stringOf,
			"how long ports stay open after the guest disconnects"),
		one("logFile", "log-file", "file", &c.LogFile, filePath(true), str,
			"file to append the log to, instead of standard error"),
		one("limits.listeners", "max-listeners", "n", &c.Limits.Listeners, whole[int](1, 1<<16), number,
			"maximum of open ports").atLeast(1),
		one("limits.flows", "max-flows", "n", &c.Limits.Flows, whole[int](1, 1<<20), number,
			"maximum of concurrent TCP connections").atLeast(1),
		one("limits.udpFlows", "max-udp-flows", "n", &c.Limits.UDPFlows, whole[int](1, 1<<20), number,
			"maximum of concurrent UDP clients").atLeast(1),
		one("limits.udpIdle", "udp-idle", "duration", &c.Limits.UDPIdle, duration(time.Second, time.Hour, false), stringOf,
			"how long an idle UDP client is remembered"),
	}, c.namesFields(), c.servingFields(), c.Common.fields())
}

func parseBind(s string) (rules.HostAddress, error) {
	if s == "asked" {
		return rules.Asked(), nil
	}
	a, err := rules.ParseHostAddress(s)
	if err != nil {
		err = fmt.Errorf("%q: want asked, loopback, all or an address of the host", s)
	}
	return a, err
}

// validate checks what involves several fields. It returns the key of the wrong one.
func (c *Agent) validate() (key string, err error) {
	if len(c.Link) == 0 {
		return "link", fmt.Errorf("an empty list: want at least one endpoint")
	}
	for _, e := range c.Link {
		switch {
		case e.Network == "hvsock":
			return "link", fmt.Errorf("%q: is for a Windows host to dial: want vsock://:PORT", e)
		case e.Network == networkWSS:
			if key, err := c.validateWSS(e); err != nil {
				return key, err
			}
		case e.Network != "vsock":
		case e.Listen && e.Port >= 1024:
			return "link", fmt.Errorf("%q: want a port below 1024, which only root can listen at", e)
		case !e.Listen && e.CID != 2:
			return "link", fmt.Errorf("%q: an agent dials only the host, want vsock://2:PORT (or vsock://:PORT to listen)", e)
		case c.LinkToken == "":
			return "linkToken", fmt.Errorf("%q: want a file, %q needs a token", "", e)
		}
	}
	if len(c.Sources) == 0 {
		return "source", fmt.Errorf("an empty list: want at least one source")
	}
	if s, ok := twice(c.Sources); ok {
		return "source", fmt.Errorf("%q: given twice, want each source once", s)
	}
	if len(c.Sinks) == 0 {
		return "sink", fmt.Errorf("an empty list: want at least one sink")
	}
	names := make([]string, len(c.Sinks))
	for i, s := range c.Sinks {
		names[i] = s.Name
	}
	if s, ok := twice(names); ok {
		return "sink", fmt.Errorf("%q: given twice, want each sink once", s)
	}
	if err := alone(names); err != nil {
		return "sink", err
	}
	return c.Cluster.validate()
}

// twice returns the first name that occurs a second time.
func twice(names []string) (string, bool) {
	for i, n := range names {
		if slices.Contains(names[:i], n) {
			return n, true
		}
	}
	return "", false
}

func (c *Host) validate() (key string, err error) {
	if key, err := c.validateServing(); err != nil {
		return key, err
	}
	if key, err := c.validateNames(); err != nil {
		return key, err
	}
	if len(c.Peers()) == 0 {
		return "connect", fmt.Errorf("an empty list: want at least one endpoint")
	}
	if c.Control == "" { // no home directory to take a default from
		return "control", fmt.Errorf("%q: want a path", "")
	}
	ids := make([]string, 0, len(c.Connect))
	for _, g := range c.Peers() {
		ids = append(ids, g.ID())
	}
	if id, ok := twice(ids); ok {
		return "connect", fmt.Errorf("%q: given twice, want each guest once", id)
	}
	return c.validateTokens(runtime.GOOS)
}

func (c *Host) validateTokens(goos string) (key string, err error) {
	for _, g := range c.Connect {
		switch {
		case g.Network == networkWSS:
			return "connect", fmt.Errorf("%q: a host does not dial agents there: want --listen wss://:PORT --guest NAME", g)
		case g.Listen:
			return "connect", fmt.Errorf("%q: a host cannot listen for its guests there: let the agent listen, and connect to vsock://CID:PORT", g)
		case g.Network != "unix" && c.LinkToken == "":
			return "linkToken", fmt.Errorf("%q: want a file, %q needs a token", "", g)
		case g.Network == "unix" && goos == "windows" && c.TokenFile(g) == "":
			return "linkToken", fmt.Errorf("not given: %q needs a token, as Windows does not tell which user serves a socket", g)
		}
	}
	return "", nil
}
