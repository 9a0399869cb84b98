// SPDX-License-Identifier: Apache-2.0

// Package probe reports to tests what a client of a TCP port meets.
package probe

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"syscall"
	"time"
)

// Answer is what a client meets at a port.
type Answer string

// What Ask returns.
const (
	Closed Answer = "closed" // nothing listens
	Reset  Answer = "reset"  // the connection was accepted and reset
	Ended  Answer = "ended"  // it was accepted and ended, without a byte
	Data   Answer = "data"   // the server sent something
	Silent Answer = "silent" // it is open, and the server sent nothing for Patience
)

// Patience bounds how long Ask waits for an answer.
const Patience = time.Minute

// Ask connects by dial, sends text if it is not empty, and waits for the first answer.
// The error is of a probe that shows nothing of the port, such as a dial that timed out.
//
// A reset may arrive at any time after the kernel completed the handshake. So it can be
// an error of dial (a client that is scheduled late finds it at once), of the write or
// of the read: tests ask for the Answer, not for an error of one of these.
func Ask(dial func() (net.Conn, error), text string) (Answer, error) {
	c, err := dial()
	if err != nil {
		return dialled(err)
	}
	defer func() { _ = c.Close() }()
	_ = c.SetDeadline(time.Now().Add(Patience))
	if _, err = io.WriteString(c, text); err == nil {
		_, err = io.ReadFull(c, make([]byte, 1))
	}
	switch {
	case err == nil:
		return Data, nil
	case errors.Is(err, io.EOF):
		return Ended, nil
	case isReset(err):
		return Reset, nil
	case errors.Is(err, os.ErrDeadlineExceeded):
		return Silent, nil
	}
	return "", err
}

func dialled(err error) (Answer, error) {
	switch {
	case errors.Is(err, syscall.ECONNREFUSED):
		return Closed, nil
	case isReset(err):
		return Reset, nil
	}
	return "", err
}

func isReset(err error) bool {
	return errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE)
}

// Listens reports whether somebody listens at a port, without waiting for an answer.
// The error is that of Ask.
func Listens(dial func() (net.Conn, error)) (bool, error) {
	c, err := dial()
	if err == nil {
		return true, c.Close()
	}
	a, err := dialled(err)
	return a == Reset, err
}

// Want returns an error unless the answer to text is want.
func Want(want Answer, dial func() (net.Conn, error), text string) error {
	got, err := Ask(dial, text)
	if err == nil && got != want {
		err = fmt.Errorf("the answer is %q, want %q", got, want)
	}
	return err
}

// WantClosed returns an error unless nobody listens.
func WantClosed(dial func() (net.Conn, error)) error {
	open, err := Listens(dial)
	if err == nil && open {
		err = errors.New("the port is open")
	}
	return err
}

// At dials an address of this network namespace.
func At(address string) func() (net.Conn, error) {
	return func() (net.Conn, error) { return net.DialTimeout("tcp", address, Patience) }
}

// From is like At, from a local address.
func From(local, address string) func() (net.Conn, error) {
	d := net.Dialer{Timeout: Patience, LocalAddr: &net.TCPAddr{IP: net.ParseIP(local)}}
	return func() (net.Conn, error) { return d.Dial("tcp", address) }
}
