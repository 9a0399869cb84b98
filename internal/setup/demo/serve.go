// SPDX-License-Identifier: Apache-2.0

//go:build linux

package demo

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"time"
)

func serveHTTP(ctx context.Context, addr string) error {
	l, err := net.Listen("tcp", addr)
	if err != nil {
		return err
	}
	srv := &http.Server{
		ReadHeaderTimeout: 5 * time.Second, MaxHeaderBytes: 64 << 10,
		Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			_, _ = fmt.Fprintf(w, "Hello from the guest: %s reached %s.\n", r.RemoteAddr, l.Addr())
		}),
	}
	defer context.AfterFunc(ctx, func() { _ = srv.Close() })()
	if err := srv.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

func serveEcho(ctx context.Context, addr string) error {
	c, err := net.ListenPacket("udp", addr)
	if err != nil {
		return err
	}
	defer context.AfterFunc(ctx, func() { _ = c.Close() })()
	buf := make([]byte, 64<<10)
	for {
		n, from, err := c.ReadFrom(buf)
		if ctx.Err() != nil {
			return nil
		}
		if err != nil {
			return err
		}
		_, _ = c.WriteTo(buf[:n], from)
	}
}
