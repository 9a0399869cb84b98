// SPDX-License-Identifier: Apache-2.0

package forward

import (
	"bytes"
	"io"
	"net"
	"runtime/debug"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// resetStream is a Stream whose connection is closed under it.
type resetStream struct {
	Stream
	raw net.Conn
}

func (s resetStream) Raw() net.Conn                { return s.raw }
func (s resetStream) BeginChunk([]byte, int) error { return nil }
func (s resetStream) Wrote(_ int, err error) error { return err }

// A flow that is reset while it has bytes in a pipe closes the pipe, and does not
// leave it to the garbage collector.
func TestResetFlowClosesItsPipe(t *testing.T) {
	defer debug.SetGCPercent(debug.SetGCPercent(-1))
	client, src := pair(t, "tcp")
	raw, _ := pair(t, "unix")
	_ = raw.Close()
	d := direction{src: src, dst: resetStream{raw: raw}, moved: new(atomic.Uint64)}
	base := fds(t)
	for range 50 {
		write(t, client, "bytes")
		if _, err := d.copyInKernel(); err == nil {
			t.Fatal("no error of a stream that was reset")
		}
	}
	if n := fds(t); n > base+4 {
		t.Errorf("%d descriptors after 50 flows that were reset, %d before", n, base)
	}
}

// withoutPipes makes the system look as if it had none left.
func withoutPipes(t *testing.T) {
	t.Helper()
	before := pipes.New
	pipes.New = func() any { return (*kernelPipe)(nil) }
	t.Cleanup(func() { pipes.New = before })
	for p := pipes.Get().(*kernelPipe); p != nil; p = pipes.Get().(*kernelPipe) {
		p.close()
	}
}

// Flows that get no pipe are copied, each with a buffer of its own.
func TestFlowsWithoutPipes(t *testing.T) {
	withoutPipes(t)
	var wg sync.WaitGroup
	for i := range 24 {
		client, a := pair(t, "tcp")
		server, b := pair(t, "tcp")
		_, _ = a.SetDeadline(time.Time{}), b.SetDeadline(time.Time{})
		wg.Go(func() { _ = Splice(t.Context(), a, b, nil) })
		sent := bytes.Repeat([]byte{byte(i)}, 16*spliceAfter)
		wg.Go(func() {
			_, _ = client.Write(sent)
			closeWrite(client)
			_, _ = io.Copy(io.Discard, client)
		})
		wg.Go(func() {
			got, err := io.ReadAll(server)
			if !bytes.Equal(got, sent) || err != nil {
				t.Errorf("flow %d: what arrived (%d bytes, %v) is not what was sent (%d bytes)", i, len(got), err, len(sent))
			}
			closeWrite(server)
		})
	}
	wg.Wait()
}

// A pipe with bytes of a flow whose other side was closed never serves another flow.
func TestPipesOfClosedFlowsAreNotReused(t *testing.T) {
	client, src := pair(t, "tcp")
	_, dst := pair(t, "tcp")
	_ = dst.Close()
	for range 20 {
		write(t, client, "bytes of this flow")
		d := direction{src: src, dst: dst, moved: new(atomic.Uint64)}
		if _, err := d.copyInKernel(); err == nil {
			t.Fatal("no error of a connection that was closed")
		}
		p := pipes.Get().(*kernelPipe)
		if n, err := unix.IoctlGetInt(p.r, unix.TIOCINQ); n != 0 || err != nil {
			t.Fatalf("a pipe for the next flow has %d bytes in it (%v)", n, err)
		}
		pipes.Put(p)
	}
}

// An urgent byte is passed over, as by read(2), and holds up nothing that follows.
func TestUrgentByte(t *testing.T) {
	for name, connect := range map[string]func(t *testing.T) (client, server net.Conn){
		"between sockets": func(t *testing.T) (client, server net.Conn) {
			a, b, _ := spliced(t.Context(), t, "tcp", "tcp", nil)
			return a, b
		},
		"through the link": func(t *testing.T) (client, server net.Conn) {
			_, client, server = flow(t)
			return client, server
		},
	} {
		t.Run(name, func(t *testing.T) {
			client, server := connect(t)
			bulk := strings.Repeat("x", 2*spliceAfter)
			for range 2 { // the second time after the byte
				go func() { _, _ = io.WriteString(client, bulk) }()
				if got := readN(t, server, len(bulk)); got != bulk {
					t.Fatal("other bytes arrived")
				}
				raw, err := client.(*net.TCPConn).SyscallConn()
				if err != nil {
					t.Fatal(err)
				}
				var serr error
				if err := raw.Control(func(fd uintptr) { serr = unix.Sendto(int(fd), []byte("!"), unix.MSG_OOB, nil) }); err != nil || serr != nil {
					t.Fatal(err, serr)
				}
				write(t, client, "after")
				if got := readN(t, server, len("after")); got != "after" {
					t.Errorf("%q", got)
				}
			}
		})
	}
}
