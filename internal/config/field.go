// SPDX-License-Identifier: Apache-2.0

package config

import (
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"net/url"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/pflag"

	"github.com/fairlead/fairlead/internal/config/words"
	"github.com/fairlead/fairlead/internal/config/yamltree"
)

// field is one setting: its key in the file ("limits.flows" is the key "flows" of
// the mapping "limits"), its flag, and its environment variable, which is
// FAIRLEAD_ and the flag's name. The tags of its struct describe it, see [yamltree.Field], with
//
//	flag   the flag's name
//	kind   what --help shows as the value
//	older  the variable of older agents that sets it
type field struct {
	yamltree.Field
	flag, kind, usage string
	older             string // empty for none
}

// fieldsOf returns the settings of a configuration.
func fieldsOf(c any, agent bool) (list []field) {
	for _, f := range yamltree.Fields(c) {
		if flag := f.Tag.Get("flag"); flag != "" {
			one := field{Field: f, flag: flag, kind: f.Tag.Get("kind"), usage: f.Tag.Get("help")}
			if agent {
				one.older = f.Tag.Get("older")
			}
			list = append(list, one)
		}
	}
	return list
}

// checks read the texts of fields whose types do not say what is allowed.
func checks() yamltree.Checks {
	return yamltree.Checks{
		"absolute":  as(absolute),
		"address":   as(nameAddr),
		"bind":      as(parseBind),
		"buffer":    as(powerOfTwo(64, 1<<20)),
		"docker":    as(dockerHost),
		"domain":    as(nameDomain),
		"file":      as(filePath(true)),
		"guest":     as(guestNameText),
		"level":     as(level),
		"listen":    as(parseListen),
		"listener":  as(listenAddr),
		"loopback":  as(loopbackAddr),
		"namespace": as(namespaceName),
		"node":      as(nodeName),
		"path":      as(filePath(false)),
		"sha256":    as(pinText),
	}
}

func as[T any](parse func(string) (T, error)) func(string) (any, error) {
	return func(s string) (any, error) { return parse(s) }
}

// env is the name of the environment variable.
func (f *field) env() string {
	return "FAIRLEAD_" + strings.ToUpper(strings.ReplaceAll(f.flag, "-", "_"))
}

// camel is the flag's name written as a key: "dockerHost".
func (f *field) camel() string {
	parts := strings.Split(f.flag, "-")
	for i, p := range parts[1:] {
		parts[i+1] = strings.ToUpper(p[:1]) + p[1:]
	}
	return strings.Join(parts, "")
}

// variable returns the value of the field's variable, and its name; "" if it is not set.
func (f *field) variable(environ func(string) (string, bool)) (name, value string) {
	if s, ok := environ(f.env()); ok {
		return f.env(), s
	}
	if f.older == "" {
		return "", ""
	}
	if s, ok := environ(f.older); ok && fromOlder(f.older, s) != "" {
		return f.older, fromOlder(f.older, s)
	}
	return "", ""
}

// text returns the value as a flag has it.
func (f *field) text() string { return strings.Join(f.Texts(), ",") }

// setText sets the field from a flag or a variable, where commas separate a list.
func (f *field) setText(s string) error {
	if !f.IsList() {
		return f.Set(checks(), s)
	}
	if strings.TrimSpace(s) == "" {
		return f.Set(checks())
	}
	parts := strings.Split(s, ",")
	for i, p := range parts {
		parts[i] = strings.TrimSpace(p)
	}
	return f.Set(checks(), parts...)
}

// flagValue makes a field a pflag.Value.
type flagValue struct{ *field }

func (v flagValue) String() string     { return v.text() }
func (v flagValue) Set(s string) error { return v.setText(s) }
func (v flagValue) Type() string       { return v.kind }

// listValue is a flag that may be given several times: the first replaces the
// default, the others add to it.
type listValue struct {
	flagValue
	given *[]string
}

func (v listValue) Set(s string) error {
	*v.given = append(*v.given, s)
	return v.setText(strings.Join(*v.given, ","))
}

func register(fs *pflag.FlagSet, fields []field) {
	for i := range fields {
		f := &fields[i]
		v := flagValue{f}
		if f.IsList() {
			fs.Var(listValue{v, new([]string)}, f.flag, f.usage)
			continue
		}
		fs.Var(v, f.flag, f.usage)
		if f.Value.Kind() == reflect.Bool {
			fs.Lookup(f.flag).NoOptDefVal = "true" // --flag alone
		}
	}
}

// powerOfTwo reads a power of two.
func powerOfTwo(lo, hi uint64) func(string) (int, error) {
	return func(s string) (int, error) {
		n, err := strconv.ParseUint(s, 10, 64)
		if err != nil || n < lo || n > hi || n&(n-1) != 0 {
			return 0, fmt.Errorf("%q: want a power of two from %d to %d", s, lo, hi)
		}
		return int(n), nil
	}
}

// filePath reads the path of a file or socket. Only where none is allowed it may be empty.
func filePath(none bool) func(string) (string, error) {
	return func(s string) (string, error) {
		switch {
		case s == "" && !none:
			return "", fmt.Errorf("%q: want a path", s)
		case strings.ContainsRune(s, 0) || strings.HasPrefix(s, "@"):
			return "", fmt.Errorf("%q: want the path of a file, not an abstract socket", s)
		}
		return s, nil
	}
}

func level(s string) (l slog.Level, err error) {
	if err = words.Check(strings.ToLower(s), "debug", "info", "warn", "error"); err != nil {
		return 0, words.Check(s, "debug", "info", "warn", "error")
	}
	err = l.UnmarshalText([]byte(s))
	return l, err
}

func listenAddr(s string) (string, error) {
	if s == "" {
		return "", nil
	}
	_, p, err := net.SplitHostPort(s)
	if err == nil {
		_, err = strconv.ParseUint(p, 10, 16)
	}
	if err != nil {
		return "", fmt.Errorf(`%q: want HOST:PORT such as "127.0.0.1:9464", or "" for none`, s)
	}
	return s, nil
}

// loopbackAddr reads an address that only programs of this machine can reach.
func loopbackAddr(s string) (string, error) {
	if s == "" {
		return "", nil
	}
	if a, err := netip.ParseAddrPort(s); err != nil || !a.Addr().IsLoopback() {
		return "", fmt.Errorf(`%q: want a loopback address such as "127.0.0.1:7420", or "" for none`, s)
	}
	return s, nil
}

// Endpoint is one end of a link. Its text is unix:///PATH; vsock://CID:PORT,
// which is dialled; vsock://:PORT, which is listened on; hvsock://MACHINE:PORT,
// which a Windows host dials; or wss://SERVER:PORT/NAME, which an agent dials. The agent
// listens on a unix endpoint, and the host dials it.
type Endpoint struct {
	Network string // "unix", "vsock", "hvsock" or "wss"
	Path    string // of a unix socket, absolute
	CID     uint32 // of a vsock endpoint to dial
	Machine string // of an hvsock endpoint: "wsl", or the id of a virtual machine
	Port    uint32 // of a vsock or hvsock endpoint, 1 to 4294967294
	Listen  bool   // vsock: listen at Port on our own CID; wss: at Server
	Server  string // of a wss endpoint: HOST:PORT
	Name    string // of a wss endpoint to dial: what the host calls this guest; empty for its host name
}

// What an error says that an agent, and a host, can be given.
const (
	agentEndpoints = "unix:///PATH, vsock://:PORT, vsock://2:PORT or wss://SERVER[:PORT][/NAME]"
	hostEndpoints  = "unix:///PATH, vsock://CID:PORT or hvsock://wsl:PORT"
)

// UnmarshalText implements encoding.TextUnmarshaler by ParseEndpoint.
func (e *Endpoint) UnmarshalText(b []byte) (err error) {
	*e, err = ParseEndpoint(string(b))
	return err
}

// ParseEndpoint reads the text of an Endpoint.
func ParseEndpoint(s string) (Endpoint, error) { return parseEndpoint(s, agentEndpoints) }

func parseEndpoint(s, want string) (Endpoint, error) {
	scheme, rest, ok := strings.Cut(s, "://")
	s = withoutSecrets(s)
	wrong := fmt.Errorf("%q: want %s", s, want)
	if !ok {
		return Endpoint{}, wrong
	}
	switch scheme {
	case networkWSS:
		return parseWSS(s, rest)
	case "unix":
		if !strings.HasPrefix(rest, "/") || strings.ContainsRune(rest, 0) {
			return Endpoint{}, fmt.Errorf("%q: want an absolute path, unix:///PATH", s)
		}
		return Endpoint{Network: "unix", Path: rest}, nil
	case "vsock":
		cid, p, ok := strings.Cut(rest, ":")
		e := Endpoint{Network: "vsock", Listen: cid == ""}
		n, err := strconv.ParseUint(p, 10, 32)
		if !ok || err != nil || n == 0 || n == 1<<32-1 { // VMADDR_PORT_ANY
			return Endpoint{}, wrong
		}
		e.Port = uint32(n)
		if !e.Listen {
			n, err := strconv.ParseUint(cid, 10, 32)
			if err != nil || n == 1<<32-1 { // VMADDR_CID_ANY
				return Endpoint{}, wrong
			}
			e.CID = uint32(n)
		}
		return e, nil
	case "hvsock":
		machine, p, ok := strings.Cut(rest, ":")
		n, err := strconv.ParseUint(p, 10, 32)
		if !ok || err != nil || n == 0 || n == 1<<32-1 {
			return Endpoint{}, wrong
		}
		if id := machineID(machine); id != "" {
			machine = id
		} else if machine != wslMachine {
			return Endpoint{}, fmt.Errorf("%q: want hvsock://wsl:PORT, or the id of a virtual machine, such as e0e16197-dd56-4a10-9195-5ee7a155a838", s)
		}
		return Endpoint{Network: "hvsock", Machine: machine, Port: uint32(n)}, nil
	}
	return Endpoint{}, wrong
}

// wslMachine names the virtual machine of WSL 2 instead of an id.
const wslMachine = "wsl"

var guid = regexp.MustCompile(`^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$`)

// machineID returns the id of a virtual machine, a GUID in braces or not, in lower case without
// braces; "" if it is none.
func machineID(s string) string {
	if inner, ok := strings.CutPrefix(s, "{"); ok {
		if s, ok = strings.CutSuffix(inner, "}"); !ok {
			return ""
		}
	}
	if s = strings.ToLower(s); !guid.MatchString(s) {
		return ""
	}
	return s
}

// withoutSecrets is an address for an error: without a user, a password or a query, which no
// endpoint has, but a URL that is given instead of one may.
func withoutSecrets(s string) string {
	if at := strings.LastIndexByte(s, '@'); at >= 0 {
		scheme, _, ok := strings.Cut(s[:at], "://")
		if ok {
			scheme += "://"
		} else {
			scheme = ""
		}
		s = scheme + "***" + s[at:]
	}
	if address, _, ok := strings.Cut(s, "?"); ok {
		s = address + "?***"
	}
	return s
}

// String returns what ParseEndpoint reads; "" of the zero Endpoint.
func (e Endpoint) String() string {
	switch {
	case e.Network == "":
		return ""
	case e.Network == "unix":
		return "unix://" + e.Path
	case e.Network == networkWSS && e.Name != "":
		return "wss://" + e.Server + "/" + e.Name
	case e.Network == networkWSS:
		return "wss://" + e.Server
	case e.Listen:
		return fmt.Sprintf("vsock://:%d", e.Port)
	case e.Network == "hvsock":
		return fmt.Sprintf("hvsock://%s:%d", e.Machine, e.Port)
	}
	return fmt.Sprintf("vsock://%d:%d", e.CID, e.Port)
}

// Sink is one sink of the agent. Its text is NAME or NAME=URL.
type Sink struct {
	Name string // "hostlink", "listener", "gvproxy", "vtunnel", NoSink or AutoSink
	// URL is where it sends to; empty means the sink's own default. gvproxy takes
	// http://HOST:PORT or unix:///PATH, vtunnel tcp://HOST:PORT or unix:///PATH.
	URL string
}

func sinkNames() []string {
	return []string{"hostlink", "listener", "gvproxy", "vtunnel", NoSink, AutoSink}
}

// sinkSchemes is which URLs each sink takes.
func sinkSchemes(name string) (schemes []string, known bool) {
	switch name {
	case "hostlink", "listener", NoSink, AutoSink:
		return nil, true
	case "gvproxy":
		return []string{"http", "unix"}, true
	case "vtunnel":
		return []string{"tcp", "unix"}, true
	}
	return nil, false
}

// UnmarshalText implements encoding.TextUnmarshaler by ParseSink.
func (s *Sink) UnmarshalText(b []byte) (err error) {
	*s, err = ParseSink(string(b))
	return err
}

// ParseSink reads the text of a Sink.
func ParseSink(s string) (Sink, error) {
	name, target, has := strings.Cut(s, "=")
	schemes, known := sinkSchemes(name)
	if !known {
		return Sink{}, fmt.Errorf("%q: want %s%s", s, words.OneOf(sinkNames()), words.Suggest(name, sinkNames()))
	}
	if !has {
		return Sink{Name: name}, nil
	}
	if len(schemes) == 0 {
		return Sink{}, fmt.Errorf("%q: %s takes no URL", s, name)
	}
	u, err := url.Parse(target)
	if err != nil || !slices.Contains(schemes, u.Scheme) ||
		(u.Scheme == "unix") != (u.Host == "") || u.Scheme == "unix" && !strings.HasPrefix(u.Path, "/") ||
		u.Scheme == "tcp" && u.Port() == "" {
		return Sink{}, fmt.Errorf("%q: want %s=%s://HOST:PORT or %s=unix:///PATH", s, name, schemes[0], name)
	}
	return Sink{name, target}, nil
}

// String returns what ParseSink reads.
func (s Sink) String() string {
	if s.URL == "" {
		return s.Name
	}
	return s.Name + "=" + s.URL
}
