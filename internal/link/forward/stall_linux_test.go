// SPDX-License-Identifier: Apache-2.0

package forward

import (
	"errors"
	"io"
	"net"
	"os"
	"testing"
	"time"
)

// clog writes to a connection until its other end has taken nothing for a moment.
func clog(t *testing.T, c net.Conn) {
	t.Helper()
	for {
		_ = c.SetWriteDeadline(time.Now().Add(300 * time.Millisecond))
		if _, err := c.Write(make([]byte, 64<<10)); err != nil {
			if !errors.Is(err, os.ErrDeadlineExceeded) {
				t.Fatal(err)
			}
			return
		}
	}
}

// A side that is reset while the other one reads nothing ends the flow, over a link and
// without one.
func TestResetWhileOtherSideDoesNotRead(t *testing.T) {
	for _, c := range []struct {
		name         string
		link, upload bool
	}{
		{"upload over a link", true, true},
		{"download over a link", true, false},
		{"without a link", false, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			var client, server net.Conn
			if c.link {
				var g *guest
				g, client, server = flow(t)
				defer eventually(t, "the flow is gone", func() bool { return g.Stats().OpenTCP == 0 })
			} else {
				client, server, _ = spliced(t.Context(), t, "tcp", "tcp", nil)
			}
			near, far := client, server
			if !c.upload {
				near, far = server, client
			}
			clog(t, near)
			Reset(near)
			_ = far.SetReadDeadline(time.Now().Add(patience))
			if err := awaitReset(far); err == nil {
				t.Errorf("no reset within %v", patience)
			}
		})
	}
}

// A side that has sent its end and is gone is not reset: what it sent is still delivered.
func TestGoneAfterItsEndIsNotReset(t *testing.T) {
	near, far := pair(t, "tcp")
	write(t, far, "all")
	_ = far.Close()
	write(t, near, "x") // the kernel answers with a reset
	eventually(t, "near is closed", func() bool { return hungUp(near) })
	if err := lost(near); err != nil {
		t.Errorf("lost = %v", err)
	}
	if b, err := io.ReadAll(near); string(b) != "all" || err != nil {
		t.Errorf("read %q, %v", b, err)
	}
}

// A receiver that pauses gets all of what was sent in order, though the sender is gone.
func TestPausedReceiverGetsAll(t *testing.T) {
	_, client, server := flow(t)
	const size = 24 << 20
	sent := make(chan error, 1)
	go func() {
		_, err := server.Write(make([]byte, size))
		_ = server.Close()
		sent <- err
	}()
	time.Sleep(2*stallAfter + stallAfter/2)
	closeWriting(t, client)
	n, err := io.Copy(io.Discard, client)
	if n != size || err != nil {
		t.Errorf("read %d bytes, %v; want %d", n, err, size)
	}
	if err := <-sent; err != nil {
		t.Error(err)
	}
}
