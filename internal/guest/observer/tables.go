// SPDX-License-Identifier: Apache-2.0

//go:build linux

package observer

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/port/procnet"
)

// readTables returns the sockets with the local port p in the network namespace of a
// process, from /proc/PID/net.
func readTables(p uint16, s space) (list []Found, err error) {
	used, err := usedTables(s.process)
	errs := []error{err}
	for _, t := range procnet.Tables() {
		if !used[t.Name] {
			continue
		}
		err := procnet.Read(filepath.Join(s.process, "net", t.Name), func(s procnet.Socket) {
			if f, ok := found(s, t.Protocol, p); ok {
				list = append(list, f)
			}
		})
		if !errors.Is(err, fs.ErrNotExist) { // no IPv6, or the process has ended
			errs = append(errs, err)
		}
	}
	for i := range list {
		list[i].Space, list[i].NetNS = s.title(), uint32(s.inode)
	}
	return list, errors.Join(errs...)
}

// usedTables returns which tables of /proc/PID/net have sockets. To read one of TCP, the
// kernel walks the connections of all namespaces, which takes it milliseconds.
func usedTables(process string) (map[string]bool, error) {
	used := make(map[string]bool)
	for _, name := range []string{"sockstat", "sockstat6"} {
		b, err := os.ReadFile(filepath.Join(process, "net", name))
		if errors.Is(err, fs.ErrNotExist) {
			continue // no IPv6, or the process has ended
		}
		if err != nil {
			return used, err
		}
		for line := range strings.Lines(string(b)) {
			protocol, counts, _ := strings.Cut(line, ": ")
			n, _, _ := strings.Cut(strings.TrimPrefix(counts, "inuse "), " ")
			used[strings.ToLower(protocol)] = strings.TrimSpace(n) != "0"
		}
	}
	return used, nil
}

// found returns a socket with the local port p that serves, or could.
func found(s procnet.Socket, protocol port.Protocol, p uint16) (_ Found, ok bool) {
	tcp, client := protocol == port.TCP, s.State == procnet.Established
	serves := tcp && s.State == procnet.Listen || !tcp && (s.State == procnet.Close || client)
	return Found{
		Socket: Socket{Protocol: protocol, Address: s.Local.Addr(), Port: p, Listening: tcp, Inode: uint32(s.Inode)},
		Client: !tcp && client,
	}, serves && s.Local.Port() == p
}
