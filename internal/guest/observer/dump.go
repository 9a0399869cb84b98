// SPDX-License-Identifier: Apache-2.0

//go:build linux

package observer

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/netip"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/guest/kernel"
	"github.com/fairlead/fairlead/internal/port"
)

// dumper reads the sockets of one network namespace by socket diag.
type dumper struct {
	netns *kernel.Namespace
	conn  *diagConn
	// boundDump says that the kernel dumps TCP sockets that are only bound
	// (since Linux 6.8).
	boundDump bool
	mptcp     bool     // the kernel has MPTCP
	ephemeral *os.File // ip_local_port_range of the namespace
	// explicit returns the cookies of the UDP sockets that were bound to an
	// address or port; nil where the kernel cannot tell.
	explicit func() (map[uint64]struct{}, error)

	rows []row
	most int // rows of the last dump
	// polls says that dumps follow each other so soon that one uses the memory of the one
	// before. Between dumps that are minutes apart nothing is kept.
	polls bool
}

// openDumper prepares dumps of netns, which must be that of the calling thread.
func openDumper(netns *kernel.Namespace) (*dumper, error) {
	d, err := newDumper(netns)
	if err == nil {
		d.boundDump, d.mptcp = d.probeBound(), probeMPTCP()
	}
	return d, err
}

// newDumper is openDumper without the probe of what the kernel can dump.
func newDumper(netns *kernel.Namespace) (*dumper, error) {
	conn, err := openDiag()
	if err != nil {
		return nil, err
	}
	d := &dumper{netns: netns, conn: conn}
	// A namespace keeps its own range; the file stays with the one it was opened in.
	d.ephemeral, err = os.Open("/proc/sys/net/ipv4/ip_local_port_range")
	if err != nil {
		return nil, errors.Join(fmt.Errorf("ephemeral ports: %w", err), d.close())
	}
	return d, nil
}

func (d *dumper) close() error {
	err := d.conn.close()
	if d.ephemeral != nil {
		err = errors.Join(err, d.ephemeral.Close())
	}
	return err
}

// probeMPTCP reports whether the kernel has MPTCP. It makes no socket, which would have the
// kernel search for a module.
func probeMPTCP() bool {
	_, err := os.Stat("/proc/sys/net/mptcp")
	return !errors.Is(err, fs.ErrNotExist)
}

// probeBound reports whether a dump shows sockets that are bound and do not listen: it does
// since Linux 6.8, and in older kernels that have the change, too. Those are asked with such a
// socket; newer ones are not, as a dump walks the table of all ports. A probe that fails counts
// as no.
func (d *dumper) probeBound() bool {
	if kernel.Since(6, 8) {
		return true
	}
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return false
	}
	defer func() { _ = unix.Close(fd) }()
	if err := unix.Bind(fd, &unix.SockaddrInet4{}); err != nil {
		return false
	}
	cookie, err := unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_COOKIE)
	if err != nil {
		return false
	}
	found := false
	err = d.conn.dump(unix.AF_INET, unix.IPPROTO_TCP, 1<<tcpBoundInactive, func(r *diagRow) {
		found = found || r.cookie == cookie
	})
	return err == nil && found
}

// dump returns the sockets of the kinds in want, and which kinds it covered: a
// kernel that cannot dump bound sockets covers less. The rows are valid until
// the next dump.
func (d *dumper) dump(ctx context.Context, want scope) ([]row, scope, error) {
	if d.rows == nil {
		d.rows = make([]row, 0, d.most)
	}
	rows, covered, err := d.read(ctx, want)
	if d.most = len(d.rows); !d.polls {
		d.rows = nil
	}
	return rows, covered, err
}

func (d *dumper) read(ctx context.Context, want scope) ([]row, scope, error) {
	covered := want
	if !d.boundDump {
		covered &^= scopeTCPBound
	}
	d.rows = d.rows[:0]
	var states uint32
	if covered&scopeTCPListen != 0 {
		states |= 1 << tcpListen
	}
	if covered&scopeTCPBound != 0 {
		states |= 1 << tcpBoundInactive
	}
	if states != 0 {
		if err := d.protocol(ctx, port.TCP, states, nil); err != nil {
			return nil, 0, fmt.Errorf("dump tcp: %w", err)
		}
	}
	if covered&scopeUDP == 0 {
		return d.rows, covered, nil
	}
	first := len(d.rows)
	clients := 0
	low, high, err := d.ephemeralRange()
	if err != nil {
		return nil, 0, fmt.Errorf("dump udp: %w", err)
	}
	err = d.protocol(ctx, port.UDP, 1<<tcpClose, func(r *row) {
		// An unbound socket that sends gets such a port.
		s := &r.socket
		if s.Address.IsUnspecified() && s.Port >= low && s.Port <= high {
			r.client = true
			clients++
		}
	})
	if err != nil {
		return nil, 0, fmt.Errorf("dump udp: %w", err)
	}
	if clients == 0 || d.explicit == nil {
		return d.rows, covered, nil
	}
	explicit, err := d.explicit()
	if err != nil {
		return nil, 0, fmt.Errorf("dump udp: %w", err)
	}
	for i := range d.rows[first:] {
		r := &d.rows[first+i]
		if _, ok := explicit[r.socket.Cookie]; ok {
			r.client = false
		}
	}
	return d.rows, covered, nil
}

// protocol appends the rows of one protocol, both families, and calls judge, if not
// nil, with each.
func (d *dumper) protocol(ctx context.Context, p port.Protocol, states uint32, judge func(*row)) error {
	for _, family := range families(uint16(p)) {
		first := len(d.rows)
		err := d.retry(ctx, family, p, states, func() { d.rows = d.rows[:first] }, func(r *diagRow) {
			if r.port != 0 && r.cookie != 0 {
				d.rows = append(d.rows, row{socket: r.socket(p, d.netns.Inode())})
			}
		})
		if err != nil {
			return err
		}
		if judge != nil {
			for i := range d.rows[first:] {
				judge(&d.rows[first+i])
			}
		}
	}
	return nil
}

// retry dumps, and after reset once more while the table changes during the dump.
func (d *dumper) retry(ctx context.Context, family uint8, p port.Protocol, states uint32, reset func(), f func(*diagRow)) error {
	for try := 1; ; try++ {
		if err := ctx.Err(); err != nil {
			return err
		}
		reset()
		err := d.conn.dump(family, uint16(p), states, f)
		if err == nil || !errors.Is(err, errInterrupted) || try == diagAttempts {
			return err
		}
	}
}

func (d *dumper) ephemeralRange() (low, high uint16, err error) {
	var b [64]byte
	n, err := d.ephemeral.ReadAt(b[:], 0)
	if err != nil && !errors.Is(err, io.EOF) {
		return 0, 0, fmt.Errorf("ephemeral ports: %w", err)
	}
	if _, err := fmt.Sscan(strings.TrimSpace(string(b[:n])), &low, &high); err != nil {
		return 0, 0, fmt.Errorf("ephemeral ports %q: %w", b[:n], err)
	}
	return low, high, nil
}

// mptcpListeners maps the addresses of MPTCP listeners to the inodes of the
// sockets that processes hold. What serves is a subflow, a TCP socket whose inode
// no file descriptor shows.
func (c *diagConn) mptcpListeners() (map[netip.AddrPort]uint32, error) {
	inodes := make(map[netip.AddrPort]uint32)
	for _, family := range families(protocolMPTCP) {
		err := c.dump(family, protocolMPTCP, 1<<tcpListen, func(r *diagRow) {
			inodes[netip.AddrPortFrom(r.address, r.port)] = r.inode
		})
		if err != nil {
			return nil, fmt.Errorf("dump mptcp: %w", err)
		}
	}
	return inodes, nil
}
