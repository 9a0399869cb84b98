// SPDX-License-Identifier: Apache-2.0

// Package config reads the configuration of agent and host peer from flags, the
// environment and a YAML file, in this order of precedence. The tags of the structs
// define all three. A wrong value is refused with its position and with what is
// allowed.
package config

import (
	"fmt"
	"log/slog"
	"runtime"
	"slices"
	"time"

	"github.com/spf13/pflag"

	"github.com/fairlead/fairlead/internal/config/rules"
	"github.com/fairlead/fairlead/internal/port/names"
)

// DefaultAgentFile is the agent's configuration file by default. It may be absent.
const DefaultAgentFile = "/etc/fairlead/agent.yaml"

// DefaultHostFile is the host peer's configuration file by default. It may be absent.
// For root on Linux it is the system's, otherwise the user's own; it is empty if the
// user has no home directory.
func DefaultHostFile() string { return in(currentDirs().config, "host.yaml") }

// Common holds the settings that agent and host share.
type Common struct {
	LinkToken   string `key:"linkToken" flag:"link-token" kind:"file" is:"file" help:"file with the shared token of the link; unless it is set, unix sockets need none"` // empty for none; see TokenFileOf
	TokenGiven  bool   // LinkToken was set, so it is for unix sockets, too
	Control     string `key:"control" flag:"control" kind:"path" is:"path" help:"path of the control socket"`
	MetricsAddr string `key:"metricsAddr" flag:"metrics-addr" kind:"host:port" is:"listener" help:"serve /metrics at this address"`                                        // empty for none
	WebAddr     string `key:"webAddr" flag:"web-addr" kind:"host:port" is:"loopback" help:"serve the status page at this loopback address; 'fairlead web' prints its URL"` // empty for none

	LogLevel  slog.Level `key:"logLevel" flag:"log-level" kind:"level" is:"level" older:"CATTLE_DEBUG" enum:"debug,info,warn,error" help:"debug, info, warn or error"`
	LogFormat string     `key:"logFormat" flag:"log-format" kind:"format" words:"text,json" help:"text or json"`
	RulesFile string     `key:"rulesFile" flag:"rules-file" kind:"file" is:"file" help:"file with more rules, evaluated after those of the configuration"` // empty for none
	// ForwardsFile is the file of the requests that are made while fairlead runs, which may
	// be absent; empty for none. See package forwards.
	ForwardsFile   string `key:"forwardsFile" flag:"forwards-file" kind:"file" is:"file" help:"file of what 'fairlead forward', 'deny', 'allow' and 'expose' request, which is evaluated after the rules and never wider; empty for none"`
	KeepPrivileges bool   `key:"keepPrivileges" flag:"keep-privileges" kind:"bool" help:"on Linux, keep all capabilities instead of dropping those that are not needed, for debugging"`

	// Rules is compiled from the rules in the file, then those in RulesFile, and
	// from what is exposed, and has those in ForwardsFile. It is never nil in what LoadAgent, LoadHost and the
	// defaults return.
	Rules *rules.Set

	files []file            // what was read
	from  map[string]string // where fields that are set got their value; see Setting
}

// Agent configures the guest agent.
type Agent struct {
	Link      []Endpoint `key:"link" flag:"link" kind:"endpoint" older:"CATTLE_SERVER" help:"where to connect with the host: unix:///PATH, vsock://:PORT to listen, vsock://2:PORT or wss://SERVER[:PORT][/NAME] to dial"` // at least one
	AllowCIDs []uint32   `key:"allowCIDs" flag:"allow-cids" kind:"cid" min:"0" max:"4294967294" help:"vsock peers that may connect"`
	AllowUIDs []uint32   `key:"allowUIDs" flag:"allow-uids" kind:"uid" min:"0" max:"4294967294" help:"users that may connect to a unix link, besides root and the agent's own"`
	Sources   []string   `key:"source" flag:"source" kind:"source" words:"socket,nat,docker,podman,containerd,kube,users" help:"where to look for ports: socket, nat, docker, podman, containerd, kube, users"`                                                             // at least one, each once
	Sinks     []Sink     `key:"sink" flag:"sink" kind:"sink" words:"hostlink,listener,gvproxy,vtunnel,none,auto" or:"^(gvproxy|vtunnel)=" help:"where to publish ports: hostlink, listener, gvproxy[=URL], vtunnel[=URL]; auto detects the product, none only lists ports"` // at least one, each name once

	Observer      string        `key:"observer" flag:"observer" kind:"mode" words:"auto,bpf,poll" help:"how to observe sockets: auto, bpf or poll"`
	PollInterval  time.Duration `key:"pollInterval" flag:"poll-interval" kind:"duration" min:"10ms" max:"1h" help:"interval of the polling observer"`
	AuditInterval time.Duration `key:"auditInterval" flag:"audit-interval" kind:"duration" min:"10s" max:"24h" zero:"off" help:"interval of full dumps that check the events; 0: only after the start and after events were lost; by default up to 10m where dumps are expensive"`
	AuditGiven    bool          // AuditInterval is exact, not the least
	EventBuffer   int           `key:"eventBuffer" flag:"event-buffer" kind:"n" is:"buffer" min:"64" max:"1048576" help:"KiB of socket events that the kernel queues for the agent, a power of two; of changed NAT rules it queues four times as much, at most 1 GiB"`
	HoldDown      time.Duration `key:"holdDown" flag:"hold-down" kind:"duration" min:"0s" max:"1m" help:"how long a port that disappeared stays published"`

	Expose rules.HostAddress `key:"expose" flag:"expose" kind:"where" words:"loopback,all" help:"host addresses of ports that listen on all guest addresses: loopback or all"`
	Labels bool              `key:"labels" flag:"labels" kind:"bool" help:"obey the labels fairlead.expose, fairlead.host-port and fairlead.name of containers, and such annotations of Services"`

	NAT         NAT           `key:"nat"`
	TLS         TLS           // of links over wss
	Docker      Docker        `key:"docker"`
	Podman      Podman        `key:"podman"`
	Containerd  Containerd    `key:"containerd"`
	Kube        Kube          `key:"kube"`
	EngineGrace time.Duration `key:"engineGrace" flag:"engine-grace" kind:"duration" min:"1s" max:"24h" zero:"off" help:"how long declared ports stay published after their engine stopped, 0 for ever"`
	Cluster     Cluster       `key:"cluster"`
	Listener    Listener      `key:"listener"`

	BridgeLoopback    bool `key:"bridgeLoopback" flag:"bridge-loopback" kind:"bool" help:"let the peers of gvproxy and vtunnel reach ports of the guest's loopback"`
	ReportUnpublished bool `key:"reportUnpublished" flag:"report-unpublished" kind:"bool" help:"send the host, for display, the ports that are not published with their owners, and the NAT rules that are not understood"`

	Publish Publish `key:"publish"`
	Common

	// ObserverMethods limits how the observer attaches, for tests: nothing in a file,
	// a flag or the environment sets it. Empty is no limit.
	ObserverMethods []string
}

// NAT configures the source that reads NAT rules.
type NAT struct {
	MaxPorts int `key:"maxPorts" flag:"nat-max-ports" kind:"n" min:"1" max:"65535" help:"maximum of ports that one NAT rule publishes; a rule for more is listed by doctor"`
}

// Host configures the host peer.
type Host struct {
	Connect []Guest           `key:"connect" flag:"connect" kind:"[name=]endpoint" help:"where the agent is: unix:///PATH, vsock://CID:PORT, on Windows hvsock://wsl:PORT or hvsock://ID:PORT; NAME= before it names the guest"` // each name and each unnamed endpoint once; at least one unless the host listens
	Bind    rules.HostAddress `key:"bind" flag:"bind" kind:"where" is:"bind" words:"asked,loopback,all" or:"[.:]" help:"host addresses of ports that listen on all guest addresses: asked (by the agent), loopback, all or an address"`
	Grace   time.Duration     `key:"grace" flag:"grace" kind:"duration" min:"0s" max:"1h" help:"how long ports stay open after the guest disconnects"`
	LogFile string            `key:"logFile" flag:"log-file" kind:"file" is:"file" help:"file to append the log to, instead of standard error"`
	Limits  Limits            `key:"limits"`
	Names   Names             `key:"names"`
	Serving Serving           // how the host takes agents that dial it
	Common
}

// Limits bounds the resources that one guest may use on the host.
type Limits struct {
	Listeners int           `key:"listeners" flag:"max-listeners" kind:"n" min:"1" max:"65536" help:"maximum of open ports of a guest; of more, each owner has the same share for each protocol"`
	Flows     int           `key:"flows" flag:"max-flows" kind:"n" min:"1" max:"1048576" help:"maximum of concurrent TCP connections"`
	UDPFlows  int           `key:"udpFlows" flag:"max-udp-flows" kind:"n" min:"1" max:"1048576" help:"maximum of concurrent UDP clients"`
	UDPIdle   time.Duration `key:"udpIdle" flag:"udp-idle" kind:"duration" min:"1s" max:"1h" help:"how long an idle UDP client is remembered"`
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

			ForwardsFile: "/var/lib/fairlead/forwards.json",
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

			ForwardsFile: in(d.state, "host-forwards.json"),
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
		return Endpoint{Network: "hvsock", Machine: wslMachine, Port: vsockPort}
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

func (c *Agent) fields() []field { return fieldsOf(c, true) }

func (c *Host) fields() []field { return fieldsOf(c, false) }

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
