// SPDX-License-Identifier: Apache-2.0

//go:build linux

package run

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/guest/peer"
)

// Streams are the client's. A nil Stdin is empty.
type Streams struct {
	Stdin          io.Reader
	Stdout, Stderr io.Writer
	Signals        <-chan os.Signal // that are sent to the program

	// Screen, unless it is nil, has the program get a terminal.
	Screen *Screen
}

// Do has the server at socket run a program, and returns how it ended. When ctx ends the
// program is killed. A read of Stdin may still be under way when Do returns.
func Do(ctx context.Context, socket string, q Request, s Streams) (Exit, error) {
	conn, err := peer.Connect(ctx, socket)
	if err != nil {
		return Exit{}, err
	}
	defer func() { _ = conn.Close() }()
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
	defer stop()
	exit, err := do(conn, q, s)
	if ctx.Err() != nil {
		return exit, context.Cause(ctx)
	}
	return exit, err
}

// explain explains an error of the connection to the server.
func explain(err error) error {
	if errors.Is(err, io.EOF) || errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE) {
		return errors.New("the service has gone: is it running?")
	}
	return err
}

func do(conn *net.UnixConn, q Request, s Streams) (Exit, error) {
	var hello reply
	got, err := peer.Receive(conn, &hello)
	got.Close()
	switch {
	case err != nil:
		return Exit{}, explain(err)
	case hello.Error != nil:
		return Exit{}, hello.Error
	case hello.Version != peer.Version:
		return Exit{}, fmt.Errorf("the service speaks version %d, this program version %d: use the same fairlead-run", hello.Version, peer.Version)
	}
	if s.Screen != nil {
		if q.TTY, err = s.Screen.terminal(); err != nil {
			return Exit{}, err
		}
		defer s.Screen.restore()
	}
	if err := peer.Send(conn, first{Nonce: hello.Nonce, Run: q}); err != nil {
		return Exit{}, explain(err)
	}
	c := client{frames: frames{conn: conn}, Streams: s, ended: make(chan struct{}), room: window}
	c.more = sync.NewCond(&c.mu)
	defer c.close()
	exit, err := c.receiveAll()
	if broken := c.broken(); err != nil && broken != nil {
		return exit, fmt.Errorf("read the input: %w", broken)
	}
	return exit, err
}

// client is the container's end of a session.
type client struct {
	frames
	Streams
	ended chan struct{}

	mu   sync.Mutex
	more *sync.Cond
	room int // of stdin that may be sent; -1 at the end

	unread error // why the rest of stdin could not be read
}

func (c *client) close() {
	close(c.ended)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.room = -1
	c.more.Broadcast()
}

// receiveAll writes what the program writes until it has ended.
func (c *client) receiveAll() (exit Exit, err error) {
	buf, oob := newBuffer(), peer.NewControl()
	for {
		k, content, err := c.receive(buf, oob)
		if err != nil {
			return exit, explain(err)
		}
		switch k {
		case frameReply:
			err = c.reply(append([]byte{byte(k)}, content...))
		case frameStdout:
			_, err = c.Stdout.Write(content)
		case frameStderr:
			_, err = c.Stderr.Write(content)
		case frameTaken:
			err = c.taken(content)
		case frameExit:
			return exit, json.Unmarshal(content, &exit)
		default:
			err = fmt.Errorf("%w: kind %q", peer.ErrMalformed, k)
		}
		if err != nil {
			return exit, err
		}
	}
}

// reply takes the server's decision.
func (c *client) reply(b []byte) error {
	var r reply
	if err := json.Unmarshal(b, &r); err != nil {
		return fmt.Errorf("%w: %w", peer.ErrMalformed, err)
	}
	if r.Error != nil {
		return r.Error
	}
	if !r.Granted {
		return nil
	}
	if c.Screen != nil {
		if err := c.Screen.raw(); err != nil {
			return err
		}
		go c.sendSizes()
	}
	go c.sendStdin()
	go c.sendSignals()
	return nil
}

// taken makes room for as many bytes of stdin.
func (c *client) taken(content []byte) error {
	var n int
	if err := json.Unmarshal(content, &n); err != nil || n < 0 {
		return fmt.Errorf("%w: %w", peer.ErrMalformed, err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.room = min(c.room+n, window)
	c.more.Broadcast()
	return nil
}

// await returns for how many bytes of stdin there is room, 0 at the end.
func (c *client) await() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	for c.room == 0 {
		c.more.Wait()
	}
	return max(c.room, 0)
}

// use counts bytes of stdin that are sent.
func (c *client) use(n int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.room >= 0 {
		c.room -= n
	}
}

func (c *client) sendStdin() {
	buf := make([]byte, maxFrame)
	for c.Stdin != nil {
		room := c.await()
		if room == 0 {
			return
		}
		n, err := c.Stdin.Read(buf[:min(room, len(buf))])
		if n > 0 {
			c.use(n)
			if c.send(frameStdin, buf[:n]) != nil {
				return
			}
		}
		switch {
		case err != nil && c.Screen != nil:
			c.giveUp(fmt.Errorf("the terminal has hung up: %w", err))
			return
		case errors.Is(err, io.EOF) || errors.Is(err, syscall.EBADF): // nohup(1) gives one that cannot be read
			_ = c.send(frameStdinEnd, nil)
			return
		case err != nil:
			c.giveUp(err)
			return
		}
	}
	_ = c.send(frameStdinEnd, nil)
}

// giveUp ends the session, by which the program is killed: it must not take for all what it
// got of an input that cannot be read.
func (c *client) giveUp(err error) {
	c.mu.Lock()
	c.unread = err
	c.mu.Unlock()
	_ = c.conn.CloseRead()
}

func (c *client) broken() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.unread
}

func (c *client) sendSignals() {
	for {
		select {
		case <-c.ended:
			return
		case s := <-c.Signals:
			if name := unix.SignalName(s.(syscall.Signal)); name != "" {
				_ = c.send(frameSignal, []byte(name[len("SIG"):]))
			}
		}
	}
}

// sendSizes sends the size of the terminal whenever it may have changed.
func (c *client) sendSizes() {
	for {
		select {
		case <-c.ended:
			return
		case <-c.Screen.Changed:
			err := c.Screen.raw()
			t, serr := c.Screen.terminal()
			if err = errors.Join(err, serr); err != nil {
				c.giveUp(err)
				return
			}
			_ = c.sendJSON(frameSize, t.Size)
		}
	}
}
