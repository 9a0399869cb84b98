// SPDX-License-Identifier: Apache-2.0

package own

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"net"
	"os"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"
)

// scripted is a listener whose Accept returns these in turn, then net.ErrClosed.
type scripted struct{ errs []error }

func (s *scripted) Accept() (net.Conn, error) {
	if len(s.errs) == 0 {
		return nil, net.ErrClosed
	}
	err := s.errs[0]
	s.errs = s.errs[1:]
	if err != nil {
		return nil, &net.OpError{Op: "accept", Net: "tcp", Err: os.NewSyscallError("accept4", err)}
	}
	return &net.TCPConn{}, nil
}

func (s *scripted) Close() error   { return nil }
func (s *scripted) Addr() net.Addr { return &net.TCPAddr{Port: 80} }

func TestServeRetriesTemporaryErrors(t *testing.T) {
	for _, errno := range []error{syscall.EMFILE, syscall.ENFILE, syscall.ENOBUFS, syscall.ENOMEM, syscall.ECONNABORTED, syscall.ENETDOWN} {
		synctest.Test(t, func(t *testing.T) {
			var log bytes.Buffer
			start, served := time.Now(), 0
			l := &scripted{errs: []error{errno, errno, errno, nil, errno, nil}}
			err := Serve(t.Context(), l, slog.New(slog.NewTextHandler(&log, nil)), func(net.Conn) { served++ })
			if err != nil || served != 2 {
				t.Errorf("%v: Serve = %v after %d connections, want nil after 2", errno, err, served)
			}
			if got, want := time.Since(start), (5+10+20+5)*time.Millisecond; got != want {
				t.Errorf("%v: paused %s in all, want %s", errno, got, want)
			}
			if n := strings.Count(log.String(), "cannot accept connections"); n != 1 {
				t.Errorf("%v: logged %d times, want once", errno, n)
			}
		})
	}
}

func TestServeEndsWithItsListener(t *testing.T) {
	l := &scripted{errs: []error{nil, syscall.EINVAL, nil}}
	err := Serve(t.Context(), l, slog.New(slog.DiscardHandler), func(net.Conn) {})
	if !errors.Is(err, syscall.EINVAL) || len(l.errs) != 1 {
		t.Errorf("Serve = %v, want EINVAL at once", err)
	}
}

func TestServeEndsWithItsContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		defer cancel()
		l := &scripted{}
		for range 1000 {
			l.errs = append(l.errs, syscall.EMFILE)
		}
		if err := Serve(ctx, l, slog.New(slog.DiscardHandler), func(net.Conn) {}); err != nil {
			t.Errorf("Serve = %v, want nil", err)
		}
	})
}
