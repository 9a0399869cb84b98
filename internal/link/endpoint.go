// SPDX-License-Identifier: Apache-2.0

package link

import (
	"fmt"
	"math"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"

	"github.com/fairlead/fairlead/internal/link/hvsock"
)

// The networks of an Endpoint.
const (
	NetworkUnix   = "unix"
	NetworkVsock  = "vsock"
	NetworkHvsock = "hvsock" // vsock as a Windows host dials it
)

// The vsock addresses with a meaning of their own (linux/vm_sockets.h).
const (
	CIDLocal = 1              // VMADDR_CID_LOCAL: loopback within one machine
	CIDHost  = 2              // VMADDR_CID_HOST: the host, seen from a guest
	CIDAny   = math.MaxUint32 // VMADDR_CID_ANY: only to listen
)

// Endpoint is where a link is dialled or listened for. It is comparable; the
// zero Endpoint is not valid.
type Endpoint struct {
	Network string // NetworkUnix, NetworkVsock or NetworkHvsock
	Path    string // of the socket, for unix: absolute
	CID     uint32 // for vsock
	Machine string // for hvsock: the id of a virtual machine, or "wsl"
	Port    uint32 // for vsock and hvsock, 1 to 2^32-2
}

const endpointForms = "want unix:///PATH or vsock://CID:PORT or hvsock://wsl:PORT"

// ParseEndpoint reads "unix:///PATH", "vsock://CID:PORT" or "hvsock://MACHINE:PORT".
// CID is a number, or "host" (2), "local" (1) or, to listen on all, "any". MACHINE
// is the id of a virtual machine, or "wsl" for that of WSL 2; it is only dialled,
// from Windows.
func ParseEndpoint(s string) (Endpoint, error) {
	network, rest, ok := strings.Cut(s, "://")
	if !ok {
		return Endpoint{}, fmt.Errorf("link endpoint %q: %s", s, endpointForms)
	}
	switch network {
	case NetworkUnix:
		return parseUnix(s, rest)
	case NetworkVsock:
		return parseVsock(s, rest)
	case NetworkHvsock:
		return parseHvsock(s, rest)
	}
	return Endpoint{}, fmt.Errorf("link endpoint %q: unknown network %q: %s", s, network, endpointForms)
}

func parseUnix(s, path string) (Endpoint, error) {
	if runtime.GOOS == "windows" && len(path) > 2 && path[0] == '/' && path[2] == ':' {
		path = path[1:] // unix:///C:/dir/socket
	}
	e := Endpoint{Network: NetworkUnix, Path: path}
	if err := e.check(); err != nil {
		return Endpoint{}, fmt.Errorf("link endpoint %q: %w", s, err)
	}
	e.Path = filepath.Clean(path)
	return e, nil
}

func parseVsock(s, rest string) (Endpoint, error) {
	cid, port, ok := strings.Cut(rest, ":")
	if !ok {
		return Endpoint{}, fmt.Errorf("link endpoint %q: no port: %s", s, endpointForms)
	}
	e := Endpoint{Network: NetworkVsock}
	switch cid {
	case "host":
		e.CID = CIDHost
	case "local":
		e.CID = CIDLocal
	case "any":
		e.CID = CIDAny
	default:
		n, err := strconv.ParseUint(cid, 10, 32)
		if err != nil {
			return Endpoint{}, fmt.Errorf("link endpoint %q: context id %q: want a number below 2^32, host, local or any", s, cid)
		}
		e.CID = uint32(n)
	}
	n, err := strconv.ParseUint(port, 10, 32)
	if err != nil {
		return Endpoint{}, fmt.Errorf("link endpoint %q: port %q: want a number from 1 to 2^32-2", s, port)
	}
	e.Port = uint32(n)
	if err := e.check(); err != nil {
		return Endpoint{}, fmt.Errorf("link endpoint %q: %w", s, err)
	}
	return e, nil
}

func parseHvsock(s, rest string) (Endpoint, error) {
	machine, port, ok := strings.Cut(rest, ":")
	n, err := strconv.ParseUint(port, 10, 32)
	if !ok || err != nil {
		return Endpoint{}, fmt.Errorf("link endpoint %q: want hvsock://wsl:PORT or hvsock://ID:PORT, PORT from 1 to 2^32-2", s)
	}
	e := Endpoint{Network: NetworkHvsock, Machine: machine, Port: uint32(n)}
	if id, err := hvsock.ParseGUID(machine); err == nil {
		e.Machine = id.String()
	}
	if err := e.check(); err != nil {
		return Endpoint{}, fmt.Errorf("link endpoint %q: %w", s, err)
	}
	return e, nil
}

func (e Endpoint) check() error {
	switch e.Network {
	case NetworkUnix:
		limit := 103 // sun_path of macOS and the BSDs, without the final NUL
		if runtime.GOOS == "linux" {
			limit = 107
		}
		switch {
		case strings.HasPrefix(e.Path, "@") || strings.Contains(e.Path, "\x00"):
			return fmt.Errorf("socket path %q: abstract sockets have no owner: want a file", e.Path)
		case !filepath.IsAbs(e.Path):
			return fmt.Errorf("socket path %q is not absolute: %s", e.Path, endpointForms)
		case strings.HasSuffix(e.Path, "/") || filepath.Base(e.Path) == "." || filepath.Base(e.Path) == "..":
			return fmt.Errorf("socket path %q names no file", e.Path)
		case len(e.Path) > limit:
			return fmt.Errorf("socket path of %d bytes: at most %d: choose a shorter one", len(e.Path), limit)
		}
		return nil
	case NetworkVsock, NetworkHvsock:
		if e.Port == 0 || e.Port == math.MaxUint32 {
			return fmt.Errorf("port %d: want a number from 1 to 2^32-2", e.Port)
		}
		if _, err := hvsock.ParseGUID(e.Machine); e.Network == NetworkHvsock && e.Machine != hvsock.WSL && err != nil {
			return fmt.Errorf("virtual machine %w, or %q", err, hvsock.WSL)
		}
		return nil
	}
	return fmt.Errorf("no endpoint: %s", endpointForms)
}

// String returns the form that ParseEndpoint reads.
func (e Endpoint) String() string {
	switch {
	case e.Network == NetworkUnix && runtime.GOOS == "windows":
		return "unix:///" + filepath.ToSlash(e.Path)
	case e.Network == NetworkUnix:
		return "unix://" + e.Path
	case e.Network == NetworkVsock && e.CID == CIDAny:
		return fmt.Sprintf("vsock://any:%d", e.Port)
	case e.Network == NetworkVsock:
		return fmt.Sprintf("vsock://%d:%d", e.CID, e.Port)
	case e.Network == NetworkHvsock:
		return fmt.Sprintf("hvsock://%s:%d", e.Machine, e.Port)
	}
	return ""
}

// MarshalText implements encoding.TextMarshaler.
func (e Endpoint) MarshalText() ([]byte, error) { return []byte(e.String()), nil }

// UnmarshalText implements encoding.TextUnmarshaler; see ParseEndpoint.
func (e *Endpoint) UnmarshalText(b []byte) error {
	v, err := ParseEndpoint(string(b))
	if err != nil {
		return err
	}
	*e = v
	return nil
}
