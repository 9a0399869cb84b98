// SPDX-License-Identifier: Apache-2.0

package config

import (
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"github.com/fairlead/fairlead/internal/hvsock"
	"github.com/fairlead/fairlead/internal/yamltree"
)

// field is one setting: its key in the file ("limits.flows" is the key "flows" of
// the mapping "limits"), its flag, and its environment variable, which is
// FAIRLEAD_ and the flag's name.
type field struct {
	key, flag, usage string
	kind             string // what --help shows as the value
	list             bool
	words            []string            // the values that it accepts; empty for any text
	pattern          string              // of further values that it accepts beside words; empty for none
	least            int                 // of a number: the smallest that it accepts
	older            string              // variable of older agents that sets it; empty for none
	fromOlder        func(string) string // reads that variable; empty sets nothing
	get              func() []string
	set              func([]string) error
}

// env is the name of the environment variable.
func (f *field) env() string {
	return "FAIRLEAD_" + strings.ToUpper(strings.ReplaceAll(f.flag, "-", "_"))
}

// camel is the flag's name written as a key: "dockerHost".
func (f *field) camel() string {
	words := strings.Split(f.flag, "-")
	for i := range words[1:] {
		words[i+1] = strings.ToUpper(words[i+1][:1]) + words[i+1][1:]
	}
	return strings.Join(words, "")
}

// oneOf declares which values the field accepts.
func (f field) oneOf(words ...string) field {
	f.words = words
	return f
}

// orMatching declares the pattern of values that the field accepts beside its words.
func (f field) orMatching(pattern string) field {
	f.pattern = pattern
	return f
}

// atLeast declares the smallest number that the field accepts.
func (f field) atLeast(n int) field {
	f.least = n
	return f
}

// alias declares a variable of older agents, which counts if the field's own is not set.
func (f field) alias(variable string, read func(string) string) field {
	f.older, f.fromOlder = variable, read
	return f
}

// variable returns the value of the field's variable, and its name; "" if it is not set.
func (f *field) variable(environ func(string) (string, bool)) (name, value string) {
	if s, ok := environ(f.env()); ok {
		return f.env(), s
	}
	if f.older == "" {
		return "", ""
	}
	if s, ok := environ(f.older); ok && f.fromOlder(s) != "" {
		return f.older, f.fromOlder(s)
	}
	return "", ""
}

func (f *field) isNumber() bool { return f.kind == "n" || f.kind == "cid" || f.kind == "uid" }

// setText sets the field from a flag or a variable, where commas separate a list.
func (f *field) setText(s string) error {
	if !f.list {
		return f.set([]string{s})
	}
	if strings.TrimSpace(s) == "" {
		return f.set(nil)
	}
	parts := strings.Split(s, ",")
	for i, p := range parts {
		parts[i] = strings.TrimSpace(p)
	}
	return f.set(parts)
}

// setNode sets the field from the file.
func (f *field) setNode(n yamltree.Node) error {
	items := []yamltree.Node{n}
	if f.list {
		items = n.List()
	}
	texts := make([]string, len(items))
	for i, item := range items {
		s, err := item.Text()
		if err != nil {
			return err
		}
		if err := f.set([]string{s}); err != nil { // one by one, to say which it is
			return item.Errorf("%v", err)
		}
		texts[i] = s
	}
	return f.set(texts)
}

func one[T any](key, flag, kind string, to *T, parse func(string) (T, error), format func(T) string, usage string) field {
	return field{
		key: key, flag: flag, kind: kind, usage: usage,
		get: func() []string { return []string{format(*to)} },
		set: func(s []string) error {
			v, err := parse(s[0])
			if err == nil {
				*to = v
			}
			return err
		},
	}
}

func many[T any](key, flag, kind string, to *[]T, parse func(string) (T, error), format func(T) string, usage string) field {
	return field{
		key: key, flag: flag, kind: kind, usage: usage, list: true,
		get: func() []string {
			var s []string
			for _, v := range *to {
				s = append(s, format(v))
			}
			return s
		},
		set: func(s []string) error {
			list := make([]T, 0, len(s))
			for _, t := range s {
				v, err := parse(t)
				if err != nil {
					return err
				}
				list = append(list, v)
			}
			*to = list
			return nil
		},
	}
}

// flagValue makes a field a pflag.Value.
type flagValue struct{ *field }

func (v flagValue) String() string     { return strings.Join(v.get(), ",") }
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
		if f.list {
			fs.Var(listValue{v, new([]string)}, f.flag, f.usage)
			continue
		}
		fs.Var(v, f.flag, f.usage)
		if f.kind == boolKind {
			fs.Lookup(f.flag).NoOptDefVal = "true" // --flag alone
		}
	}
}

func str(s string) string                 { return s }
func stringOf[T fmt.Stringer](v T) string { return v.String() }

// enum reads one of the words.
func enum(words ...string) func(string) (string, error) {
	return func(s string) (string, error) {
		if slices.Contains(words, s) {
			return s, nil
		}
		return "", fmt.Errorf("%q: want %s%s", s, yamltree.OneOf(words), yamltree.Suggest(s, words))
	}
}

// duration reads a Go duration from lo to hi; zero, where lo is not, may be
// allowed as well.
func duration(lo, hi time.Duration, zero bool) func(string) (time.Duration, error) {
	return func(s string) (time.Duration, error) {
		d, err := time.ParseDuration(s)
		if err == nil && (d >= lo && d <= hi || zero && d == 0) {
			return d, nil
		}
		want := fmt.Sprintf("%s to %s", lo, hi)
		if zero {
			want = "0 (off), or " + want
		}
		return 0, fmt.Errorf(`%q: want a duration such as "150ms", %s`, s, want)
	}
}

// whole reads a whole number.
func whole[T ~int | ~uint32](lo, hi uint64) func(string) (T, error) {
	return func(s string) (T, error) {
		n, err := strconv.ParseUint(s, 10, 64)
		if err != nil || n < lo || n > hi {
			return 0, fmt.Errorf("%q: want a whole number from %d to %d", s, lo, hi)
		}
		return T(n), nil
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

func number[T ~int | ~uint32](n T) string { return strconv.FormatUint(uint64(n), 10) }

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

func logLevels() []string { return []string{"debug", "info", "warn", "error"} }

func level(s string) (slog.Level, error) {
	words := logLevels()
	var l slog.Level
	if !slices.Contains(words, strings.ToLower(s)) {
		return 0, fmt.Errorf("%q: want %s%s", s, yamltree.OneOf(words), yamltree.Suggest(s, words))
	}
	err := l.UnmarshalText([]byte(s))
	return l, err
}

func levelName(l slog.Level) string { return strings.ToLower(l.String()) }

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
		id, err := hvsock.ParseGUID(machine)
		switch {
		case err == nil:
			machine = id.String()
		case machine != hvsock.WSL:
			return Endpoint{}, fmt.Errorf("%q: want hvsock://wsl:PORT, or the id of a virtual machine: %w", s, err)
		}
		return Endpoint{Network: "hvsock", Machine: machine, Port: uint32(n)}, nil
	}
	return Endpoint{}, wrong
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

// String returns what ParseEndpoint reads.
func (e Endpoint) String() string {
	switch {
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

// ParseSink reads the text of a Sink.
func ParseSink(s string) (Sink, error) {
	name, target, has := strings.Cut(s, "=")
	schemes, known := sinkSchemes(name)
	if !known {
		words := sinkNames()
		return Sink{}, fmt.Errorf("%q: want %s%s", s, yamltree.OneOf(words), yamltree.Suggest(name, words))
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
